"""Vocabularies compared with the libraries that read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sentencepiece

from engine.errors import CheckpointError, RequestError
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import (
    CORPUS,
    TOKENIZERS,
    byte_level,
    llama,
    sentencepiece_model,
    settings_of,
    vocabulary_of,
    write_checkpoint,
)

SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}


@pytest.fixture(params=TOKENIZERS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / request.param, TOKENIZERS[request.param](), tokenizer_config=SPECIAL)


def test_encodes_like_the_library(tmp_path: Path) -> None:
    tokenizer = byte_level()
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, tokenizer))
    for text in [*CORPUS, "", "a<s>b<tool é>c"]:
        assert vocabulary.encode(text, False) == tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text, True) == tokenizer.encode(text).ids
    assert vocabulary.encode("x", True)[0] == 0 != vocabulary.encode("x", False)[0]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode("a b c d e f").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    assert vocabulary_of(write_checkpoint(tmp_path, tokenizer)).encode("a b c d e f", True) == expected


def test_every_family_knows_its_special_and_end_tokens(directory: Path) -> None:
    vocabulary = vocabulary_of(directory)
    end = vocabulary.encode("</s>", False)[-1]
    assert vocabulary.eos_token_ids == (end,)
    assert {vocabulary.encode(token, False)[-1] for token in ("<s>", "</s>")} <= vocabulary.special_ids
    assert vocabulary.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_byte_level_tokens_have_their_real_bytes(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, byte_level()))
    text = "日本語 𝄞 naïve <tool é> <begin▁é>"
    token_ids = vocabulary.encode(text, False)
    assert b"".join(map(vocabulary.bytes_of, token_ids)) == text.encode()
    assert any(not piece.isascii() and len(piece) == 1 for piece in map(vocabulary.bytes_of, vocabulary.encode("𝄞", False)))
    assert vocabulary.longest_token_bytes == max(map(len, vocabulary.token_bytes))


def test_first_token_loses_its_leading_space(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, llama()))
    first = vocabulary.encode("The", False)[0]
    assert vocabulary.bytes_of(first).startswith(b" ")
    assert vocabulary.first_bytes_of(first) == vocabulary.bytes_of(first)[1:]
    assert vocabulary.bytes_of(vocabulary.encode("\U0001f600", False)[-1]) == b"\x80"


def test_unknown_ids_have_no_bytes(directory: Path) -> None:
    vocabulary = vocabulary_of(directory)
    for token_id in (-1, vocabulary.size, 10**9):
        assert vocabulary.bytes_of(token_id) == vocabulary.first_bytes_of(token_id) == b""


def test_sentencepiece_encodes_as_the_library(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, sentencepiece_model()))
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    for text in [*CORPUS, "", " x"]:
        assert vocabulary.encode(text, True) == processor.EncodeAsIds(text)
    assert vocabulary.special_ids == {processor.bos_id(), processor.eos_id()}
    assert vocabulary.bytes_of(processor.unk_id()) == processor.Decode([processor.unk_id()]).encode()


def test_sentencepiece_cuts_out_special_and_added_tokens(tmp_path: Path) -> None:
    """Ernie's layout: tokens added by added_tokens.json and tokenizer_config.json above the model's own."""
    config = SPECIAL | {"added_tokens_decoder": {"421": {"content": "<|turn|>", "special": True}}, "cls_token": "<|turn|>"}
    path = write_checkpoint(tmp_path, sentencepiece_model(), tokenizer_config=config, added_tokens={"<plain>": 423})
    vocabulary = vocabulary_of(path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    quick = processor.EncodeAsIds("quick")
    assert vocabulary.encode("<|turn|>quick</s><plain>", True) == [processor.bos_id(), 421, *quick, processor.eos_id(), 423]
    assert vocabulary.encode("quick", False) == quick
    assert vocabulary.size == 424
    assert 421 in vocabulary.special_ids
    assert 423 not in vocabulary.special_ids
    assert (vocabulary.bytes_of(423), vocabulary.bytes_of(422), vocabulary.bytes_of(421)) == (b"<plain>", b"", b"<|turn|>")


def test_special_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps(
            {"pad_token": {"content": "<pad>"}, "eos_token": "</old>", "additional_special_tokens": ["<a>", {"content": "<b>"}]}
        )
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": None, "add_bos_token": False})
    )
    settings = settings_of(tmp_path)
    assert settings.special_tokens == {"pad_token": "<pad>", "eos_token": "</s>"}
    assert settings.more_special_tokens == ("<a>", "<b>")


def test_chat_templates_are_found_wherever_they_are(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert settings_of(tmp_path).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert settings_of(tmp_path).chat_templates == {"default": "two", "tool_use": "three"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "four"}))
    assert settings_of(tmp_path).chat_templates["default"] == "four"
    (tmp_path / "chat_template.jinja").write_text("five")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("six")
    assert settings_of(tmp_path).chat_templates == {
        "default": "five",
        "tool_use": "three",
        "rag": "six",
    }


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{"), ("tokenizer.model", "no model"), ("tokenizer_config.json", "[1]"), ("", "")]
)
def test_a_broken_checkpoint_is_named(tmp_path: Path, name: str, text: str) -> None:
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name or "has none of"):
        vocabulary_of(tmp_path)


def test_empty_sentencepiece_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read"):
        vocabulary_of(tmp_path)


def test_panic_of_the_library_is_named(tmp_path: Path) -> None:
    """A panic of Rust code is no Exception."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(byte_level().to_str()), "normalizer": normalizer}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: .*precompiled_charsmap"):
        vocabulary_of(tmp_path)


def test_ids_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    parts = json.loads(byte_level().to_str())
    parts["model"]["vocab"]["z"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match="token id 4000000000 exceeds"):
        vocabulary_of(tmp_path)
    added = write_checkpoint(tmp_path / "added", sentencepiece_model(), added_tokens={"<far>": 4_000_000_000})
    with pytest.raises(CheckpointError, match="token id 4000000000 exceeds"):
        vocabulary_of(added)


def test_invalid_decoder_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(byte_level().to_str()), "decoder": ["x"]}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        vocabulary_of(tmp_path)


def test_settings_of_other_types_are_left_out(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "a"}, {"template": "b"}, {"name": "default", "template": "c"}]}
    config |= {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    settings = settings_of(tmp_path)
    assert (settings.chat_templates, settings.added_tokens) == ({"default": "c"}, ())


def test_settings_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        settings_of(tmp_path)


def test_decoder_unsuitable_for_streams_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, byte_level())
    content = json.loads((path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="CTC"):
        vocabulary_of(path)


def test_a_model_without_tokenizer_takes_token_ids_only() -> None:
    vocabulary = Vocabulary.without_text(100)
    assert vocabulary.bytes_of(7) == b""
    with pytest.raises(RequestError, match="token ids"):
        vocabulary.encode("text", True)
