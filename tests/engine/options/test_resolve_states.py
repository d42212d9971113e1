"""Slots of recurrent states: how many an engine has, what they cost, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.recurrent_layer import RecurrentLayer
from engine.checkpoint.state_spec import StateSpec
from engine.errors import OptionError, TooLargeError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_memory import check_memory, memory_needs
from engine.options.resolve_states import MAX_DEFAULT_BYTES, MAX_DEFAULT_STATES, resolve_states
from engine.options.table import OptionValues
from engine.options.vllm_flags import VLLM_FLAGS
from shm.memory import MemoryLimit
from tests.engine.checkpoint.test_state_spec import hybrid
from tools.demo import MODEL

LARGE = RecurrentLayer(channels=8192, kernel=4, matrix=(32, 128, 128), log_width=8256)  # about 2 MiB
SMALL = RecurrentLayer(channels=1024, kernel=3)
MIB = 1 << 20


def slots(*arguments: str, layer: RecurrentLayer = LARGE, device: str = "cpu", **sizes: int) -> dict[str, Any]:
    return slots_of(read_options(["m", *arguments], {}), hybrid((layer, layer, layer, None), (3,)), device, **sizes)


def slots_of(
    options: OptionValues, model: ModelConfig, device: str = "cpu", num_kv_blocks: int = 4096, max_model_len: int = 32768
) -> dict[str, Any]:
    return resolve_states(options, model, device, KVCacheSpec.of(model, 16, "float32"), num_kv_blocks, max_model_len)


def test_each_sequence_has_three_slots() -> None:
    spec = StateSpec((LARGE, LARGE, LARGE, None), 0)
    found = slots("--max-num-seqs", "5", "--state-cache-memory", "100MiB")
    assert found["num_states"] == 15 + 100 * MIB // spec.slot_bytes
    assert found["state_bytes"] == spec.arena_bytes(found["num_states"])


def test_default_is_bounded_by_memory_and_number() -> None:
    large, small = slots("--max-num-seqs", "1"), slots("--max-num-seqs", "1", layer=SMALL)
    assert 3 < large["num_states"] <= 3 + MAX_DEFAULT_BYTES // (6 * MIB)
    assert small["num_states"] == 3 + MAX_DEFAULT_STATES


def test_log_is_as_long_as_drafts_are() -> None:
    plain, drafts = (slots(*arguments) for arguments in ((), ("--spec-method", "mtp", "--spec-tokens", "4")))
    of_slot = [found["state_bytes"] // (found["num_states"] + 1) for found in (plain, drafts)]
    assert of_slot[1] - of_slot[0] == 3 * 5 * 4 * (8192 + 8256), "of drafts, and of the position that is computed again"


def test_interval_grows_with_the_longest_prompt() -> None:
    assert slots("--state-cache-memory", "100GiB")["state_cache_interval"] == 512
    assert slots("--state-cache-memory", "100GiB", "--max-num-batched-tokens", "100")["state_cache_interval"] == 112
    few = slots("--state-cache-memory", "80MiB")
    assert few["state_cache_interval"] == 8192
    assert slots("--state-cache-memory", "80MiB", num_kv_blocks=256)["state_cache_interval"] == 1024, "the cache holds less"
    assert slots("--state-cache-memory", "80MiB", "--state-cache-interval", "48")["state_cache_interval"] == 48
    assert slots("--block-size", "1024", "--state-cache-memory", "100GiB")["state_cache_interval"] == 1024


@pytest.mark.parametrize("arguments", [("--no-enable-prefix-caching",), ("--state-cache-memory", "0")])
def test_nothing_is_kept_if_nothing_can_be_found(arguments: tuple[str, ...]) -> None:
    found = slots("--max-num-seqs", "4", *arguments)
    assert (found["num_states"], found["state_cache_interval"]) == (12, 0)


def test_options_of_states_that_nothing_can_find_are_noted() -> None:
    model = hybrid((LARGE, None), (1,))
    interval = ("--state-cache-interval", "64")
    for arguments, expected in (
        (("--no-enable-prefix-caching", "--state-cache-memory", "1GiB", *interval), ["interval", "memory"]),
        (("--state-cache-memory", "0", *interval), ["interval"]),
        (("--no-enable-prefix-caching", "--state-cache-memory", "0"), []),
    ):
        options = read_options(["m", *arguments], {})
        slots_of(options, model)
        assert [note.partition(":")[0] for note in options.notes] == [
            f"--state-cache-{name} has no effect" for name in expected
        ]


def test_models_without_recurrent_layers_have_no_slots() -> None:
    model = replace(hybrid((None, None), (0, 1)), recurrent_layers=(), attention_layers=None)
    options = read_options(["m", "--state-cache-interval", "64", "--state-cache-memory", "1GiB"], {})
    assert slots_of(options, model) == {"num_states": 0, "state_bytes": 0, "state_cache_interval": 0}
    assert [note.partition(":")[0] for note in options.notes] == [
        "--state-cache-interval has no effect",
        "--state-cache-memory has no effect",
    ]


@pytest.mark.parametrize(
    ("arguments", "device", "text"),
    [
        (("--state-cache-interval", "100"), "cpu", "is not a multiple of --block-size 16: .* use 112"),
        (("--state-cache-memory", "1MiB"), "cpu", "is too small: a state of this model has .*; use at least .* bytes, or 0"),
        ((), "gpu", "have recurrent layers, which only the CPU computes so far; use --device cpu"),
    ],
    ids=["interval", "memory", "device"],
)
def test_what_does_not_work_is_refused(arguments: tuple[str, ...], device: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        slots(*arguments, device=device)


def test_flag_of_vllm_sets_the_interval() -> None:
    assert VLLM_FLAGS["mamba_block_size"].text == "state_cache_interval"
    assert read_options(["m", "--mamba-block-size", "512"], {}).values["state_cache_interval"] == 512


def test_states_count_in_the_memory_of_the_engine() -> None:
    options = read_options([str(MODEL), "--data-parallel-size", "2", "--threads", "1"], {})
    config, record = resolve(options)
    config = replace(config, num_states=96 + 4, state_bytes=101 * 48 * MIB)
    plain = memory_needs(replace(config, num_states=0, state_bytes=0), record.config, 0)
    needs = memory_needs(config, record.config, 0)
    assert needs.total - plain.total == needs.states == 2 * 101 * 48 * MIB
    assert "recurrent states 9.5 GiB" in needs.text
    limit = MemoryLimit("the machine", 4 << 30)
    with pytest.raises(TooLargeError, match=r"this would fit: --max-num-seqs 8 \(3.3 GiB\)"):
        check_memory(options, config, record.config, [limit], [])
    many = replace(config, num_states=96 + 400, state_bytes=497 * 48 * MIB)
    with pytest.raises(TooLargeError, match=r"this would fit: --state-cache-memory 603979776 \("):
        check_memory(options, many, record.config, [MemoryLimit("the machine", 11 << 30)], [])
