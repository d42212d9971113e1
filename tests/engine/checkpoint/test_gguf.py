"""GGUF files as checkpoints: configuration, tokenizers that give the originals' tokens, and files that are refused."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.checkpoint.gguf.file import shortest
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import CORPUS, sentencepiece_model, settings_of, vocabulary_of, write_checkpoint
from tests.ggufs import (
    CONTROL,
    UNKNOWN,
    add_value,
    as_type,
    byte_level_metadata,
    original_metadata,
    shape_writer,
    write,
    write_gguf,
)
from tools.demo import MODEL as DEMO

GIB = 1 << 30
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "  two  spaces\n\n\n and lines \r\n\t tabs",
    "It's WE'LL 12345 3.14 x_y ... !!!",
    "ends with space ",
    "e\u0301 or \u00e9; \u2581 and <|im_start|>user\nhi<|im_end|> <tool>x</tool>",
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def write_small(path: Path, changes: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """Write a file with one tensor, for tests of metadata. `changes`: of config.json."""
    writer = shape_writer(path, json.loads((DEMO / "config.json").read_text()) | (changes or {}))
    for key, value in metadata.items():
        writer.kv_data[0].pop(key.replace("__", "."), None)  # the package writes no key twice
        add_value(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokenizer__ggml__tokens"]), 128), np.float32))
    write(writer)
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-F16.gguf"
    write_gguf(path, DEMO, as_type("F16"), **original_metadata(DEMO))
    return path


class TestEmbeddedModel:
    def test_configuration(self, demo: Path) -> None:
        found, original = ModelConfig.read(resolve_model(str(demo))), ModelConfig.read(DEMO)
        assert original.shape_differences(found) == []
        assert found.eos_token_ids == (2, 0)  # <|endoftext|> ends an answer, too

    def test_tokenizer_and_template(self, demo: Path) -> None:
        path = resolve_model(str(demo))
        found, original = vocabulary_of(path), vocabulary_of(DEMO)
        assert [found.encode(text, True) for text in TEXTS] == [original.encode(text, True) for text in TEXTS]
        assert (found.token_bytes, found.special_ids) == (original.token_bytes, original.special_ids)
        assert settings_of(path).chat_templates == settings_of(DEMO).chat_templates
        assert settings_of(path).special_tokens == {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        }

    def test_options(self, demo: Path) -> None:
        config = resolve(read_options(["--model", str(demo)], {}))[0]
        assert config.served_model_name == ("demo-F16", str(demo))
        assert Path(config.model).joinpath("model.gguf").resolve() == demo

    def test_kept_until_the_file_changes(self, demo: Path, cache: Path) -> None:
        first = resolve_model(str(demo))
        marker = first / "marker"
        marker.touch()
        assert resolve_model(str(demo)) == first
        assert marker.exists()
        os.utime(demo, ns=(1, 1))
        assert resolve_model(str(demo)) != first
        assert not list((cache / "tokamak" / "gguf").glob(".new-*"))

    def test_cache_that_cannot_be_written(self, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
            resolve_model(str(demo))


# -------------------------------------------------------------------------------------------------------- tokenizers

PATTERNS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def trained(rule: str) -> Tokenizer:
    """Return a tokenizer like the tokenizer.json of Qwen2, Llama 3 or GPT-2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if rule in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[rule]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    names = ("<|begin|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if rule == "llama-bpe":
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    return tokenizer


@pytest.fixture(scope="module", params=["qwen2", "llama-bpe", "gpt-2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, Vocabulary]:
    """Return the original tokenizer and the one from the file."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = trained(request.param)
    roles = {"bos": "<|begin|>", "eos": "<|im_end|>"}
    metadata = {f"tokenizer__ggml__{role}_token_id": tokenizer.token_to_id(token) for role, token in roles.items()}
    path = write_small(folder / "small.gguf", **byte_level_metadata(tokenizer, request.param), **metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return vocabulary_of(write_checkpoint(folder / "original", tokenizer)), vocabulary_of(resolve_model(str(path)))


def test_same_tokens(pair: tuple[Vocabulary, Vocabulary]) -> None:
    original, found = pair
    for text in TEXTS:
        for is_adding in (True, False):
            assert found.encode(text, is_adding) == original.encode(text, is_adding), text
    assert found.token_bytes == original.token_bytes
    assert found.special_ids == original.special_ids
    assert found.eos_token_ids == (original.pieces.index("<|im_end|>"),)


@settings(max_examples=100)
@given(text=st.text(max_size=40))
def test_same_tokens_of_any_text(pair: tuple[Vocabulary, Vocabulary], text: str) -> None:
    original, found = pair
    assert found.encode(text, True) == original.encode(text, True)


class TestSentencepiece:
    def metadata(self, **changes: Any) -> dict[str, Any]:
        processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
        kinds: list[tuple[Callable[[int], bool], int]] = [
            (processor.IsUnknown, UNKNOWN),
            (processor.IsControl, CONTROL),
            (processor.IsUnused, 5),
            (processor.IsByte, 6),
        ]
        size = processor.GetPieceSize()
        types = [next((kind for test, kind in kinds if test(index)), 1) for index in range(size)]
        return {
            "tokenizer__ggml__model": "llama",
            "tokenizer__ggml__tokens": [*map(processor.IdToPiece, range(size)), "<|im_start|>"],
            "tokenizer__ggml__scores": [*map(processor.GetScore, range(size)), -1000.0],
            "tokenizer__ggml__token_type": [*types, CONTROL],
            "tokenizer__ggml__bos_token_id": 1,
            "tokenizer__ggml__eos_token_id": 2,
            **changes,
        }

    def test_same_tokens(self, tmp_path: Path) -> None:
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "added_tokens_decoder": {"420": {"content": "<|im_start|>", "special": True}},
        }
        original = vocabulary_of(write_checkpoint(tmp_path / "original", sentencepiece_model(), tokenizer_config=config))
        found = vocabulary_of(resolve_model(str(write_small(tmp_path / "small.gguf", **self.metadata()))))
        for text in TEXTS:
            assert found.encode(text, True) == original.encode(text, True), text
        assert (found.token_bytes, found.special_ids) == (original.token_bytes, original.special_ids)
        assert [found.first_bytes_of(index) for index in range(420)] == [original.first_bytes_of(index) for index in range(420)]

    def test_without_the_space_before_a_text(self, tmp_path: Path) -> None:
        metadata = self.metadata(tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=False)
        found = vocabulary_of(resolve_model(str(write_small(tmp_path / "small.gguf", **metadata))))
        token_ids = found.encode("The fox", True)
        assert b"".join(found.bytes_of(token_id) for token_id in token_ids) == b"The fox"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokenizer__ggml__scores": [0.0]}, "scores: has 1 values for 421 tokens"),
            ({"tokenizer__ggml__token_type": [1] * 421}, "has no unknown token, and unknown_token_id names none"),
            ({"tokenizer__ggml__token_type": [1]}, "token_type: has 1 values for 421 tokens"),
            ({"tokenizer__ggml__bos_token_id": 999}, "bos_token_id: 999 is outside the vocabulary of 421 tokens"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(write_small(tmp_path / "small.gguf", **self.metadata(**changes))))


# ----------------------------------------------------------------------------------------------- options and refusals

PLAIN: dict[str, Any] = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__tokens": ["a", "b", "<|im_end|>"],
    "tokenizer__ggml__token_type": [1, 1, 3],
}


def test_rope_scaling(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512}
    metadata = {f"qwen3__rope__scaling__{name}": value for name, value in scaling.items()}
    rope = ModelConfig.read(resolve_model(str(write_small(tmp_path / "a.gguf", **PLAIN, **metadata)))).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 512)
    metadata = {"qwen3__rope__scaling__type": "linear", "qwen3__rope__scaling__factor": 2.0, "qwen3__rope__dimension_count": 16}
    rope = ModelConfig.read(resolve_model(str(write_small(tmp_path / "b.gguf", **PLAIN, **metadata)))).rope
    assert (rope.rope_type, rope.factor, rope.rotary_dim) == ("linear", 2.0, 16)


@pytest.mark.parametrize(
    ("model_type", "token", "lacks_encoder"),
    [("qwen3_vl", "b", True), ("qwen3", "<|image_pad|>", False), ("gemma3_text", "<image_soft_token>", True)],
)
def test_model_that_lacks_its_encoder_is_known(model_type: str, token: str, lacks_encoder: bool, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    changes = {"model_type": model_type, "sliding_window": 512, "rope_parameters": rope}
    path = write_small(tmp_path / "a.gguf", changes, **PLAIN | {"tokenizer__ggml__tokens": ["a", token, "<|im_end|>"]})
    assert ModelConfig.read(resolve_model(str(path))).lacks_encoder == lacks_encoder


def test_pictures_need_another_checkpoint(tmp_path: Path) -> None:
    options = read_options(["--model", str(write_small(tmp_path / "a.gguf", {"model_type": "qwen3_vl"}, **PLAIN))], {})
    resolve(options)
    assert options.notes == [f"{tmp_path}/a.gguf has the text model only: pictures need the model's safetensors checkpoint"]


def test_templates_by_name(tmp_path: Path) -> None:
    metadata = {"tokenizer__chat_template": "{{ 1 }}", "tokenizer__chat_template__tool_use": "{{ 2 }}"}
    path = resolve_model(str(write_small(tmp_path / "a.gguf", **PLAIN, **metadata)))
    assert settings_of(path).chat_templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert ModelConfig.read(path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__model": "rwkv"}, r"tokenizer\.ggml\.model: 'rwkv' is not supported; expected llama or one of gpt2"),
        ({"tokenizer__ggml__pre": "saxon"}, r"tokenizer\.ggml\.pre: 'saxon' is not supported; expected one of default"),
        ({"split__count": 3}, "split.count: the file is one of 3 parts; rename the parts to NAME-00001-of-00003.gguf"),
        ({"qwen3__expert_count": 8}, r"qwen3\.expert_count: 8 is not supported"),
        ({"qwen3__rope__scaling__type": "longrope"}, "rope.scaling.type: 'longrope' is not supported"),
        ({"qwen3__attention__value_length": 64}, "value_length: differs from attention.key_length, 32"),
        ({"qwen3__block_count": 1 << 31}, r"qwen3\.block_count: 2147483648 should be an integer of at most 4096"),
        ({"tokenizer__ggml__token_type": [-3]}, r"token_type: -3 is not a type of tokens; expected 0 to 6"),
        ({"tokenizer__ggml__merges": ["ab"]}, r"merges: 'ab' should be two tokens with a space between them"),
        ({"qwen3__feed_forward_length": [1, 2]}, r"feed_forward_length: \[1, 2\] should be an integer"),
        ({"general__architecture": "clip"}, "general.architecture: 'clip' reads pictures, .*; use the model's safetensors"),
        ({"qwen3__nextn_predict_layers": 1}, "has only MTP layers; use the file with the whole model"),
        (
            {"general__architecture": "mamba"},
            "general.architecture: 'mamba' is not supported; expected one of llama, .*qwen2",
        ),
    ],
)
def test_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf", **PLAIN | metadata)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(path))


def test_heads_without_width_are_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf", {"head_dim": None}, **PLAIN, qwen3__embedding_length=1)
    with pytest.raises(CheckpointError, match=r"qwen3\.embedding_length: 1 is less than attention.head_count"):
        resolve_model(str(path))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_scores_that_no_float32_holds_are_refused(kind: str) -> None:
    for score, problem in ((1e300, "1e+300 exceeds the range of float32"), (float("nan"), "[0.0, nan] should be a list of")):
        values = {"model": kind, "tokens": ["a", "b"], "token_type": [2, 1], "scores": [0.0, score]}
        options = JsonOptions({f"tokenizer.ggml.{name}": value for name, value in values.items()}, Path("a.gguf"))
        with pytest.raises(CheckpointError, match=re.escape(problem)):
            tokenizer_files(options)


def text_of(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def entry(key: str, kind: int, *numbers: int) -> bytes:
    """Return a metadata entry with an integer, the length of a string, or type and length of an array."""
    return text_of(key) + struct.pack("<I", kind) + struct.pack({4: "<I", 8: "<Q", 9: "<IQ"}[kind], *numbers)


def tensor(name: str, shape: tuple[int, ...], offset: int) -> bytes:
    """Return the entry of a float32 tensor."""
    return text_of(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


class TestDamaged:
    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.02, 0.5, 0.999])
    def test_truncated(self, share: float, demo: Path, tmp_path: Path) -> None:
        data = demo.read_bytes()
        (tmp_path / "a.gguf").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(CheckpointError, match=r"truncated or damaged|cannot be read|not a GGUF file"):
            resolve_model(str(tmp_path / "a.gguf"))

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"PK\3\4" + bytes(40), "not a GGUF file"),
            (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "GGUF version 1; supported versions are 2, 3"),
            (b"GGUF\0\0\0\3" + bytes(40), "GGUF version 50331648"),  # the other byte order
            (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 8, "truncated or damaged"),
            (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"a\x63\0\0\0", "unknown type 99"),
            (
                b"GGUF\3\0\0\0"
                + bytes(8)
                + b"\1"
                + bytes(7)
                + b"\1"
                + bytes(7)
                + b"a\x09\0\0\0"
                + (b"\x09\0\0\0\1" + bytes(7)) * 5000,
                "nested deeper than 8",
            ),
        ],
    )
    def test_header(self, data: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(tmp_path / "a.gguf"))

    @pytest.mark.parametrize(
        ("entries", "tensors", "message"),
        [
            ([entry("a", 4, 1), entry("a", 4, 2)], [], "metadata entry a twice"),
            ([], [tensor("t", (4,), 0), tensor("t", (4,), 32)], "tensor t twice"),
            ([], [tensor("t", (16,), 0), tensor("u", (4,), 32)], "t and u overlap at byte"),
            ([], [tensor("t", (1 << 60, 0), 0)], "t has the shape"),
            ([], [tensor("t", (), 0)], "t has 0 dimensions"),
            ([], [tensor("t" * 2000, (4,), 0)], "a tensor's name, tttt.* has 2000 characters"),
            ([entry("a", 9, 0, (1 << 23) + 1)], [], "array of 8388609 values is longer than"),
            ([entry("a", 8, 1 << 29)], [], "metadata exceeds 256 MiB"),
        ],
    )
    def test_contents(self, entries: list[bytes], tensors: list[bytes], message: str, tmp_path: Path) -> None:
        """Repeated, overlapping, empty and enormous parts, in a file of 1 GiB that takes no space."""
        counts = struct.pack("<QQ", len(tensors), len(entries))
        (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0" + counts + b"".join([*entries, *tensors]))
        os.truncate(tmp_path / "a.gguf", GIB)
        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(tmp_path / "a.gguf"))

    @pytest.mark.parametrize("num_tensors", [0, 1 << 60])
    def test_counts(self, num_tensors: int, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0" + struct.pack("<QQ", num_tensors, 1 << 59))
        os.truncate(tmp_path / "a.gguf", GIB)
        with pytest.raises(CheckpointError, match=f"should have {1 << 59} metadata entries and {num_tensors} tensors"):
            resolve_model(str(tmp_path / "a.gguf"))

    def test_type_of_a_tensor(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3")
        kind = gguf.GGMLQuantizationType.Q8_K
        writer.add_tensor("token_embd.weight", np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
        write(writer)
        with pytest.raises(
            CheckpointError, match=r"token_embd\.weight has type Q8_K, which is not supported; supported: F32, F16, Q4_0"
        ):
            resolve_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("value", [1e-6, 1e-5, 10000.0, 500000.0, 0.1, 1 / 3, 8.0, float("inf"), 0.0, -2.5])
def test_shortest(value: float) -> None:
    stored = float(np.float32(value))
    assert np.float32(shortest(stored)) == np.float32(stored)
    assert len(repr(shortest(stored))) <= len(repr(stored))
    if len(repr(value)) < 8:
        assert shortest(stored) == value
