"""Slots for states of recurrent layers: how many there are, and which states are kept. Part of `resolve.py`."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.state_spec import StateSpec
from engine.config import STATES_PER_SEQUENCE
from engine.errors import OptionError
from engine.options.table import OptionValues
from shm.memory import available_memory_bytes
from shm.sizes import size_text

MAX_DEFAULT_BYTES = 1 << 30
MAX_DEFAULT_STATES = 1024
_OPTIONS = ("state_cache_interval", "state_cache_memory")


def resolve_states(
    options: OptionValues, model: ModelConfig, device: str, kv_cache: KVCacheSpec, num_kv_blocks: int, max_model_len: int
) -> dict[str, Any]:
    """Return fields of the configuration. Without recurrent layers there are no slots, and a note says so if an option asks for
    some."""
    values, spec = options.values, StateSpec.of(model, options.values["speculative_config"].num_logged)
    if spec is None:
        options.notes += [
            f"{_flag(name)} has no effect: {model.architecture} models have no recurrent layers"
            for name in _OPTIONS
            if values[name] is not None
        ]
        return {"num_states": 0, "state_bytes": 0, "state_cache_interval": 0}
    if device != "cpu":
        raise OptionError(
            f"--device {device}: {model.architecture} models have recurrent layers, which only the CPU computes so far; use "
            "--device cpu"
        )
    num_kept = _num_kept(values, spec.slot_bytes) if values["enable_prefix_caching"] else 0
    if not num_kept:
        why = "--state-cache-memory is 0" if values["enable_prefix_caching"] else "--no-enable-prefix-caching keeps no states"
        options.notes += [f"{_flag(name)} has no effect: {why}" for name in _OPTIONS if values[name]]
    longest = min(max_model_len, num_kv_blocks * kv_cache.block_size)
    num_states = STATES_PER_SEQUENCE * values["max_num_seqs"] + num_kept
    return {
        "num_states": num_states,
        "state_bytes": spec.arena_bytes(num_states),
        "state_cache_interval": _interval(values, longest, num_kept) if num_kept else 0,
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _num_kept(values: dict[str, Any], slot_bytes: int) -> int:
    """Return the slots for kept states, beside those that running sequences need."""
    asked = values["state_cache_memory"]
    if asked is None:
        room: int = min(MAX_DEFAULT_BYTES, available_memory_bytes() // 8 // values["data_parallel_size"])
        return max(1, min(MAX_DEFAULT_STATES, room // slot_bytes))
    if 0 < asked < slot_bytes:
        raise OptionError(
            f"--state-cache-memory {size_text(asked)} is too small: a state of this model has {size_text(slot_bytes)}; use at "
            f"least {slot_bytes} bytes, or 0 to keep no states"
        )
    return int(asked // slot_bytes)


def _interval(values: dict[str, Any], longest: int, num_kept: int) -> int:
    """Return the tokens between kept states of a prompt: as given, else as many as a step has, so that no step is cut, or more
    if the states of the longest prompt would take more than half of the slots."""
    asked, block_size = values["state_cache_interval"], values["block_size"]
    if asked is not None:
        if asked % block_size:
            raise OptionError(
                f"--state-cache-interval {asked} is not a multiple of --block-size {block_size}: states are kept at the "
                f"ends of blocks; use {-(-asked // block_size) * block_size}"
            )
        return int(asked)
    interval: int = -(-values["max_num_batched_tokens"] // block_size) * block_size
    while interval * max(1, num_kept // 2) < longest:
        interval *= 2
    return interval
