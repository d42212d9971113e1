"""Whether a model fits into memory is known before it is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.checkpoint.files import open_file
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.stored_weights import GGUF_BYTES, StoredWeights
from engine.config import EngineConfig
from engine.errors import OptionError, TooLargeError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_memory import MemoryNeeds, affordable_cache_bytes, check_memory, memory_needs
from engine.options.table import OptionValues
from shm.memory import MemoryLimit
from shm.rank_group import buffers_at
from tests.paths import GOLDEN
from tests.workers.checkpoints import TINY, write_checkpoint
from tests.workers.test_variants import VARIANTS
from tests.workers.weights.formats.quantizers import FORMATS, demo_tensors, write_quantized_demo
from tools.demo import MODEL
from workers.weights.formats.block_types import INTEGERS

MIB, GIB = 1 << 20, 1 << 30
LLAMA_8B = {
    **TINY,
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False},
}
PLAIN = ("--load-format", "dummy", "--dtype", "bfloat16", "--no-check-memory")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def configured(*arguments: str) -> tuple[OptionValues, EngineConfig, ModelConfig]:
    options = read_options(list(arguments), {})
    config, record = resolve(options)
    return options, config, record.config


def refusal(limit: MemoryLimit, *arguments: str) -> str:
    with pytest.raises(OptionError) as error:
        check_memory(*configured(*arguments), [MemoryLimit("the machine", 1 << 50), limit], [])
    return str(error.value)


def test_weights_of_a_model_without_files(large: Path) -> None:
    stored, model = StoredWeights.of_config(ModelConfig.read(large)), ModelConfig.read(large)
    assert stored.num_values == pytest.approx(8.03e9, rel=0.001)
    assert stored.num_bytes(model, "bfloat16", "none") == pytest.approx(16.06e9, rel=0.001)
    assert stored.num_bytes(model, "bfloat16", "wint8") == pytest.approx(8.6e9, rel=0.02)
    assert stored.num_bytes(model, "bfloat16", "wint4") == pytest.approx(6e9, rel=0.1)


def test_mxfp4_is_held_in_4_bits_with_scales_of_16_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["gpt_oss mxfp4"]["config"])
    experts, hidden, inner, layers = 5, 64, 96, 2
    num_values = layers * experts * 3 * hidden * inner
    assert StoredWeights.read(tmp_path).integer_bytes == num_values // 2 + 2 * num_values // 32


@pytest.mark.parametrize(
    ("name", "bytes_per_value"),
    [
        *(("nvfp4", 0.75), ("nf4", 1.0625), ("llm.int8", 1.0), ("fp8 tensor", 0.0)),
        *(("torchao int8", 1.0), ("hqq 3", 0.5), ("hqq 4", 0.5), ("hqq 8", 1.0)),
    ],
)
def test_formats_are_counted_as_held(name: str, bytes_per_value: float, tmp_path: Path) -> None:
    """FP8 becomes floats, so it counts with the plain matrices."""
    write_quantized_demo(tmp_path, FORMATS[name]())
    linears = [tensor.size for name, tensor in demo_tensors().items() if name.endswith("_proj.weight")]
    found = StoredWeights.read(tmp_path)
    assert found.integer_bytes == pytest.approx(bytes_per_value * sum(linears), rel=0.01)
    assert found.num_values == pytest.approx(sum(tensor.size for tensor in demo_tensors().values()), rel=0.08)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gemma3_text"])
def test_files_and_configuration_agree(name: str) -> None:
    read, model = StoredWeights.read(GOLDEN / name), ModelConfig.read(GOLDEN / name)
    assert StoredWeights.of_config(model).num_values == pytest.approx(read.num_values, rel=0.35)
    assert read.num_values == read.num_in_matrices + read.num_others


@pytest.mark.parametrize("has_index", [False, True])
def test_weights_stored_twice_count_once(has_index: bool, tmp_path: Path) -> None:
    """Mistral's repositories have them also as `consolidated.safetensors`."""
    write_checkpoint(tmp_path, TINY)
    once = StoredWeights.read(tmp_path)
    assert once.num_values
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    if has_index:
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert StoredWeights.read(tmp_path) == once


def test_refusal_names_each_part_and_what_would_fit(large: Path) -> None:
    text = refusal(MemoryLimit("the control group /box", 14 * GIB), str(large), *PLAIN)
    assert re.search(
        r"it needs 16\.\d GiB of memory \(weights 15 GiB, KV cache 1\d*\.?\d* [GM]iB, .*\), but 14 GiB are available "
        r"\(the control group /box\); this would fit: --quantization wint8 \(9\.\d GiB\); --no-check-memory starts it anyway$",
        text,
    )
    assert "this would fit: --quantization wint4 (" in refusal(MemoryLimit("a", 8 * GIB), str(large), *PLAIN)
    assert "no setting makes it fit, use a smaller model or more memory" in refusal(MemoryLimit("a", GIB), str(large), *PLAIN)


def test_smaller_cache_is_suggested_in_the_options_given(large: Path) -> None:
    limit = MemoryLimit("a", 17 * GIB)
    for option, number in (("--num-kv-blocks", 10000), ("--kv-cache-memory", "20GiB")):
        text = refusal(limit, str(large), *PLAIN, option, str(number))
        found = re.search(rf"this would fit: ({option} \S+) \(", text)
        assert found
        check_memory(*configured(str(large), *PLAIN, *found[1].split()), [limit], [])


def test_replicas_need_memory_of_their_own(large: Path) -> None:
    arguments = (str(large), *PLAIN, "--kv-cache-memory", "4GiB")
    check_memory(*configured(*arguments), [MemoryLimit("a", 21 * GIB)], [])
    text = refusal(MemoryLimit("a", 21 * GIB), *arguments, "--data-parallel-size", "2")
    assert "KV cache 8 GiB" in text
    assert "weights 15 GiB" in text, "one file for all ranks, in the run's directory"


@pytest.mark.parametrize("shares_experts", [False, True])
def test_replicas_without_a_weight_cache_share_weights(shares_experts: bool, large: Path) -> None:
    _, config, model = configured(str(large), *PLAIN)
    changes = {"data_parallel_size": 2, "weight_cache_dir": "", "enable_expert_parallel": shares_experts}
    by_ops = [msgspec.structs.replace(config, **changes, ops=ops) for ops in ("native", "reference")]
    assert [memory_needs(each, model, GIB).weights for each in by_ops] == [GIB, 2 * GIB]


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized_demo(tmp_path, FORMATS["packed 4"]())
    opened: list[Path] = []
    monkeypatch.setattr("engine.checkpoint.stored_weights.open_file", lambda path: opened.append(path) or open_file(path))
    configured(str(tmp_path), "--quantization", "auto", "--max-model-len", "auto", "--kv-cache-memory", "64MiB")
    configured(str(tmp_path), "--quantization", "auto", "--max-model-len", "auto")
    assert len(opened) == 1
    (tmp_path / "model.safetensors").write_bytes(bytes(9))
    assert StoredWeights.read(tmp_path) == StoredWeights()


def test_resource_limits_of_each_process(large: Path) -> None:
    parts = configured(str(large), *PLAIN, "--kv-cache-memory", "4GiB")
    plenty = [MemoryLimit("the machine", 1 << 50)]
    worker = "a worker with its KV cache and 15 GiB of weights"
    for name, what, needed in (("ulimit -v", worker, 19.5), ("ulimit -f", "the KV cache", 4)):
        with pytest.raises(OptionError, match=rf"{name} allows 3 GiB, but {what} needs at least {needed} .*`{name} unlimited`"):
            check_memory(*parts, plenty, [MemoryLimit(name, 3 * GIB)])
        check_memory(*parts, plenty, [MemoryLimit(name, int((needed + 0.5) * GIB))])


def test_small_model_is_not_measured(tmp_path: Path) -> None:
    """Even without a readable header there is room for four times the file."""
    config = configured(str(MODEL))[1]
    least = memory_needs(config, ModelConfig.read(MODEL), 0)
    assert least.total < 512 * MIB
    assert least.weights == 0


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the memory of the machine in GiB."""

    def set_memory(gib: float) -> None:
        limit = MemoryLimit("the machine", int(gib * GIB))
        monkeypatch.setattr("engine.options.resolve_memory.memory_limits", lambda: [limit])
        for module in ("resolve", "resolve_memory"):
            monkeypatch.setattr(f"engine.options.{module}.available_memory_bytes", lambda: limit.available_bytes)

    return set_memory


DUMMY = ("--load-format", "dummy", "--dtype", "bfloat16")


@pytest.mark.parametrize(("gib", "expected"), [(40, "none"), (14, "wint8"), (8, "wint4")])
def test_automatic_quantization(gib: int, expected: str, large: Path, with_memory: Callable[[float], None]) -> None:
    with_memory(gib)
    options, config, _ = configured(str(large), *DUMMY, "--quantization", "auto")
    assert config.quantization == options.values["quantization"] == expected
    notes = [note for note in options.notes if "--quantization" in note]
    assert len(notes) == 1
    assert notes[0].startswith(f"--quantization auto: {expected}, the weights take ")


def test_automatic_quantization_without_room_is_refused(large: Path, with_memory: Callable[[float], None]) -> None:
    with_memory(1)
    with pytest.raises(TooLargeError, match=r"weights 5\.\S+ GiB.* no setting makes it fit"):
        configured(str(large), *DUMMY, "--quantization", "auto")
    config = configured(str(large), *DUMMY, "--quantization", "auto", "--no-check-memory")[1]
    assert config.quantization == "wint4"


@pytest.mark.parametrize(
    "options",
    [
        "--max-model-len 8192",
        "--max-model-len auto",
        "--max-model-len auto --data-parallel-size 2",
        "--max-model-len auto -tp 2",
        "--max-model-len auto --enable-lora --max-loras 2 --max-lora-rank 256",
        "--max-model-len auto --max-num-batched-tokens 8192 --max-num-seqs 256",
        "--max-model-len auto --api-processes 8 --tokenizer-processes 8",
        '--max-model-len auto --speculative-config {"method":"ngram,suffix"}',
    ],
)
def test_automatic_choices_pass_the_check(options: str, large: Path, with_memory: Callable[[float], None]) -> None:
    for gib in (13, 17, 24, 40, 80):
        with_memory(gib)
        config = configured(str(large), *DUMMY, "--quantization", "auto", *options.split())[1]
        assert config.max_model_len >= 2048


def test_automatic_length_may_take_a_smaller_cache(large: Path, with_memory: Callable[[float], None]) -> None:
    options = (str(large), *DUMMY, "--quantization", "wint4", "--kv-cache-dtype", "bfloat16")
    with_memory(20)
    needed = memory_needs(*configured(*options)[1:], 0).total + StoredWeights.of_config(ModelConfig.read(large)).num_bytes(
        ModelConfig.read(large), "bfloat16", "wint4"
    )
    with_memory((needed - 64 * MIB) / GIB)
    with pytest.raises(TooLargeError):
        configured(*options)
    assert 2048 <= configured(*options, "--max-model-len", "auto")[1].max_model_len < 8192


def test_ranks_and_adapters_need_memory_of_their_own() -> None:
    """Buffers and exchange of all ranks; the adapters once. Ranks that share experts have one exchange."""
    model = ModelConfig.read(GOLDEN / "qwen3_moe")

    def needs(*options: str) -> MemoryNeeds:
        return memory_needs(configured(str(GOLDEN / "qwen3_moe"), *options)[1], model, MIB)

    one, two, four = needs(), needs("-tp", "2"), needs("-tp", "2", "-dp", "2")
    assert (one.adapters, one.ranks) == (0, 0)
    assert (two.step, four.step) == (2 * one.step, 4 * one.step)
    assert four.ranks == 2 * two.ranks > 0
    config = configured(str(GOLDEN / "qwen3_moe"), "-tp", "2", "-dp", "2", "--enable-expert-parallel")[1]
    assert memory_needs(config, model, MIB).ranks == config.comm_bytes > buffers_at(4)
    on_cards = msgspec.structs.replace(config, ops="cuda")  # rows are exchanged in memory of the cards
    assert memory_needs(on_cards, model, MIB).ranks == buffers_at(4)
    assert memory_needs(msgspec.structs.replace(on_cards, enable_expert_parallel=False), model, MIB).ranks == 2 * buffers_at(2)
    config = configured(str(MODEL), "--enable-lora")[1]
    assert memory_needs(config, ModelConfig.read(MODEL), MIB).adapters == config.adapter_bytes > 0
    config = configured(str(GOLDEN / "qwen3_moe"), "--enable-lora")[1]  # experts take memory when they are loaded
    assert 0 < memory_needs(config, model, MIB).adapters < config.adapter_expert_bytes < config.adapter_bytes


def test_indexes_of_drafts_need_memory() -> None:
    plain, drafting = (configured(str(MODEL), "--speculative-config", text)[1] for text in ("{}", '{"method": "suffix"}'))
    model = ModelConfig.read(MODEL)
    assert memory_needs(plain, model, 0).drafts == 0
    assert memory_needs(drafting, model, 0).drafts > 64 * MIB


def test_automatic_quantization_leaves_stored_integers() -> None:
    assert configured(str(MODEL), "--quantization", "auto")[1].quantization == "none"
    assert configured(str(MODEL), "--quantization", "auto", "--ops", "reference")[1].quantization == "none"


def test_automatic_length_gets_a_larger_cache(large: Path, with_memory: Callable[[float], None]) -> None:
    for gib, expected in ((40, 131072), (24, 0), (17, 8176)):
        with_memory(gib)
        plain, automatic = (configured(str(large), *PLAIN, *more)[1] for more in ((), ("--max-model-len", "auto")))
        assert plain.max_model_len == 8176
        assert plain.max_model_len <= automatic.max_model_len
        assert automatic.max_model_len == expected or not expected
        room = affordable_cache_bytes(automatic, ModelConfig.read(large))
        assert room < (gib - 15) * GIB
        assert automatic.kv_cache_bytes <= max(room, plain.kv_cache_bytes)
    assert configured(str(MODEL), "--max-model-len", "auto")[1].max_model_len == 2048


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": ENTRY | {"shape": ["x"]}},
        {"a": ENTRY | {"shape": [-5, 1 << 70]}},
        {"a": ENTRY | {"shape": 5}},
        {"a": ENTRY | {"dtype": ["F32"]}},
        {"a": ENTRY | {"dtype": "I32", "data_offsets": ["a", "b"]}},
        {"a": ENTRY | {"data_offsets": [0, 4, 8]}},
        {"a": ENTRY | {"dtype": "U8", "data_offsets": [0.5, None]}, "a.absmax": ENTRY},
        [],
    ],
)
def test_header_of_other_types_counts_nothing(header: Any, tmp_path: Path) -> None:
    """The loader reports the error."""
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert StoredWeights.read(tmp_path) == StoredWeights()


def test_deep_header_and_pipe_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    os.mkfifo(tmp_path / "b.safetensors")
    assert StoredWeights.read(tmp_path) == StoredWeights()


@pytest.mark.parametrize("name", INTEGERS)
def test_gguf_types_are_counted_as_kernels_hold_them(name: str) -> None:
    """Integers, and a scale (and offset) of each group, in 16 bits if the format has such scales."""
    held = INTEGERS[name][0]
    bits = 8 if held.kind == "int8" else 4
    of_scale = 4 if held.scales == "float32" else 2
    assert GGUF_BYTES[name] == bits / 8 + of_scale * (1 + held.has_offsets) / held.group_size
