"""Memory that an engine needs and memory that is available, compared before anything is loaded. Part of `resolve.py`.

An estimate: weights as the kernels hold them, by the headers of the files; arenas as they will be reserved; buffers of the
largest step; a fixed amount per process. Called by the launcher, so a model that is too large ends the start at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.checkpoint.comm_spec import max_logit_rows, max_rows
from engine.checkpoint.gguf.file import LINK_NAME
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.stored_weights import StoredWeights
from engine.config import STATES_PER_SEQUENCE, EngineConfig
from engine.errors import TooLargeError
from engine.options.table import OptionValues
from engine.process.segments import MediaMemory
from engine.process.topology import SHARED_BUDGET_BYTES, default_plan, role_of
from shm.memory import MemoryLimit, available_memory_bytes, memory_limits, process_limits
from shm.rank_group import buffers_at
from shm.sizes import size_text

QUANTIZATIONS = ("none", "wint8", "wint4")  # in the order in which `auto` tries them
_PROCESS_BYTES = 40 << 20
_PADDLE_BYTES = 350 << 20  # of a worker that computes with Paddle's ops
_VALUE_BYTES = 4
_HIDDEN_BUFFERS, _INNER_BUFFERS, _LOGIT_BUFFERS = 8, 3, 2  # buffers that exist at once, per row of a step
_LARGEST_GROWTH = 4  # loaded weights are at most this many times as large as the files: 8-bit floats become float32
_SPARE_SHARE = 0.95  # share of the available memory that `auto` plans with
LEAST_TOKENS = 2048  # of a cache that is suggested
_MAPPED_BYTES = 512 << 20  # address space of a worker without its cache and weights


class MemoryNeeds(msgspec.Struct, frozen=True):
    """Bytes by part, of all processes together."""

    weights: int = 0
    kv_cache: int = 0
    step: int = 0
    processes: int = 0
    media: int = 0
    adapters: int = 0
    ranks: int = 0
    drafts: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    @property
    def text(self) -> str:
        parts = sorted(msgspec.structs.asdict(self).items(), key=lambda part: -part[1])
        return ", ".join(f"{_NAMES.get(name, name)} {_rounded(num_bytes)}" for name, num_bytes in parts if num_bytes)


_NAMES = {
    **{"kv_cache": "KV cache", "step": "buffers of a step", "media": "images and video", "ranks": "exchange between ranks"},
    **{"drafts": "indexes of drafts", "states": "recurrent states"},
}


def memory_needs(config: EngineConfig, model: ModelConfig, weights_bytes: int) -> MemoryNeeds:
    """Return the needs of an engine. `weights_bytes`: of one replica."""
    names = [actor.name for actor in default_plan(config)]
    replicas, on_host = config.data_parallel_size, config.has_cache_on_host
    rows = max_rows(config.max_num_batched_tokens, config.max_num_seqs)
    logit_rows = max_logit_rows(rows, config.max_num_seqs, config.speculative_config.max_drafts)
    width = _HIDDEN_BUFFERS * model.hidden_size + _INNER_BUFFERS * _inner(model)
    step = _VALUE_BYTES * (rows * width + _LOGIT_BUFFERS * logit_rows * model.vocab_size)
    is_shared = bool(config.weight_cache_dir) or config.ops == "native"  # without a cache, the file is in the run's directory
    media = MediaMemory.of(config) if model.vision is not None else None
    return MemoryNeeds(
        weights=weights_bytes * (1 if is_shared else replicas) if on_host else 0,
        kv_cache=config.kv_cache_bytes * replicas if on_host else 0,
        step=step * config.num_ranks if on_host else 0,
        processes=_processes_bytes(config, names),
        media=sum(media.slab_bytes.get(role_of(name), 0) for name in names) + replicas * media.encoder_bytes if media else 0,
        adapters=config.adapter_bytes - config.adapter_expert_bytes,
        ranks=_exchange_bytes(config),
        drafts=_drafts_bytes(config) * replicas,
        states=config.state_bytes * replicas,
    )


def _exchange_bytes(config: EngineConfig) -> int:
    """Return the bytes that ranks use of their comm arenas. Only native ops exchange rows there."""
    num_arenas = 1 if config.enable_expert_parallel else config.data_parallel_size
    most = config.comm_bytes if config.ops == "native" else buffers_at(config.num_ranks // num_arenas)
    return num_arenas * min(config.comm_bytes, most)


def _drafts_bytes(config: EngineConfig) -> int:
    """Return the bytes of a replica's indexes for drafting."""
    index_bytes, token_bytes = config.speculative_config.index_bytes
    return index_bytes + token_bytes * config.num_kv_blocks * config.block_size


def _processes_bytes(config: EngineConfig, names: Sequence[str]) -> int:
    num_with_paddle = config.num_ranks if config.ops not in ("native", "cuda") else 0
    return (1 + len(names)) * _PROCESS_BYTES + num_with_paddle * _PADDLE_BYTES + SHARED_BUDGET_BYTES


def _inner(model: ModelConfig) -> int:
    chosen = model.experts.num_chosen * model.experts.intermediate_size if model.experts else 0
    return max(model.largest_intermediate_size, chosen)


# ------------------------------------------------------------------------------------------------------------ check


def check_memory(
    options: OptionValues,
    config: EngineConfig,
    model: ModelConfig,
    limits: Sequence[MemoryLimit] | None = None,
    of_process: Sequence[MemoryLimit] | None = None,
) -> None:
    """Raise TooLargeError if the engine does not fit, with the sum by part and settings that fit. `limits`: on all processes
    together, `of_process`: on each process; None: those of this machine."""
    least = min(memory_limits() if limits is None else limits, key=lambda limit: limit.available_bytes)
    largest = memory_needs(config, model, _LARGEST_GROWTH * _file_bytes(Path(config.model)))
    if largest.total > least.available_bytes or config.load_format == "dummy":
        stored = stored_weights(Path(config.model), config.load_format, model)
        needs = memory_needs(config, model, stored.num_bytes(model, config.dtype, config.quantization))
        if needs.total > least.available_bytes:
            fitting = _fitting(options, config, model, stored, least.available_bytes)
            raise TooLargeError(
                f"--model {config.model}: it needs {_rounded(needs.total)} of memory ({needs.text}), but "
                f"{_rounded(least.available_bytes)} are available ({least.name}); "
                + (f"this would fit: {fitting}" if fitting else "no setting makes it fit, use a smaller model or more memory")
                + "; --no-check-memory starts it anyway"
            )
    _check_process(config, model, process_limits() if of_process is None else of_process)


def _check_process(config: EngineConfig, model: ModelConfig, limits: Sequence[MemoryLimit]) -> None:
    """Check what each worker maps, and the size of the largest arena, against resource limits."""
    for limit in limits:
        needed, what = (config.kv_cache_bytes if config.has_cache_on_host else 0), "the KV cache"
        remedy = "lower --kv-cache-memory"
        if limit.name == "ulimit -v":
            weights = _weights_of_rank(config, model) if config.has_cache_on_host else 0
            needed, what = needed + weights + _MAPPED_BYTES, f"a worker with its KV cache and {_rounded(weights)} of weights"
            remedy += " or choose --quantization"
        if needed > limit.available_bytes:
            raise TooLargeError(
                f"{limit.name} allows {_rounded(limit.available_bytes)}, but {what} needs at least {_rounded(needed)}; "
                f"raise it (`{limit.name} unlimited`), or {remedy}"
            )


def _weights_of_rank(config: EngineConfig, model: ModelConfig) -> int:
    """Return the least bytes of weights that each rank maps."""
    stored = stored_weights(Path(config.model), config.load_format, model)
    return stored.num_bytes(model, config.dtype, config.quantization) // config.tensor_parallel_size


def _fitting(options: OptionValues, config: EngineConfig, model: ModelConfig, stored: StoredWeights, available: int) -> str:
    """Return the settings that change the least and fit; empty if there are none."""
    spec = KVCacheSpec.of(model, config.block_size, config.kv_cache_dtype, config.speculative_config.has_mtp)
    least_cache = spec.arena_bytes(math.ceil(min(config.max_model_len, LEAST_TOKENS) / config.block_size))
    can_round = config.ops in ("native", "cuda") and config.quantization == "none" and not stored.integer_bytes
    quantizations = QUANTIZATIONS if can_round else (config.quantization,)
    present, slot_bytes = _num_kept_states(config), config.state_bytes // (config.num_states + 1)
    numbers = dict.fromkeys((config.data_parallel_size, 1)), quantizations, _batch_sizes(config), _halvings(present)
    for replicas, quantization, max_num_seqs, num_kept in itertools.product(*numbers):
        num_states = STATES_PER_SEQUENCE * max_num_seqs + num_kept if config.num_states else 0
        changed = msgspec.structs.replace(
            config,
            max_num_seqs=max_num_seqs,
            num_states=num_states,
            state_bytes=slot_bytes * (num_states + 1),
            data_parallel_size=replicas,
            kv_cache_bytes=0,
        )
        needs = memory_needs(changed, model, stored.num_bytes(model, config.dtype, quantization))
        room = (available - needs.total) // replicas
        if room < least_cache:
            continue
        parts = [f"--data-parallel-size {replicas}"] if replicas != config.data_parallel_size else []
        parts += [f"--quantization {quantization}"] if quantization != config.quantization else []
        parts += [f"--max-num-seqs {max_num_seqs}"] if max_num_seqs != config.max_num_seqs else []
        parts += [f"--state-cache-memory {num_kept * slot_bytes}"] if num_kept != present else []
        cache = min(room, config.kv_cache_bytes)
        if cache < config.kv_cache_bytes:
            num_blocks = int(_SPARE_SHARE * cache) // spec.bytes_per_block - 1
            cache = spec.arena_bytes(num_blocks)
            in_blocks = options.values["num_kv_blocks"] is not None
            size = _rounded(cache).replace(" ", "")
            parts.append(f"--num-kv-blocks {num_blocks}" if in_blocks else f"--kv-cache-memory {size}")
        return f"{' '.join(parts)} ({_rounded(needs.total + replicas * cache)})"
    return ""


def _batch_sizes(config: EngineConfig) -> list[int]:
    """Return the sizes of batches to try: smaller ones only if each sequence needs much memory, for its recurrent states."""
    return _halvings(config.max_num_seqs) if config.num_states else [config.max_num_seqs]


def _num_kept_states(config: EngineConfig) -> int:
    return config.num_states - STATES_PER_SEQUENCE * config.max_num_seqs if config.num_states else 0


def _halvings(number: int) -> list[int]:
    """Return a number, its half and so on down to 1."""
    return [number >> halvings for halvings in range(max(1, number.bit_length()))]


# ------------------------------------------------------------------------------------------------------------- auto


def note_quantization(options: OptionValues, config: EngineConfig, model: ModelConfig) -> None:
    """Note the choice of `--quantization auto`."""
    stored = stored_weights(Path(config.model), config.load_format, model)
    size = _rounded(stored.num_bytes(model, config.dtype, config.quantization))
    options.notes.append(f"--quantization auto: {config.quantization}, the weights take {size}")


def affordable_cache_bytes(config: EngineConfig, model: ModelConfig, share: float = _SPARE_SHARE) -> int:
    """Return the bytes of each replica that everything else leaves for a cache, of this share of the available memory."""
    stored = stored_weights(Path(config.model), config.load_format, model)
    weights = stored.num_bytes(model, config.dtype, config.quantization)
    others = memory_needs(msgspec.structs.replace(config, num_kv_blocks=0, kv_cache_bytes=0), model, weights).total
    return max(0, int(share * available_memory_bytes()) - others) // config.data_parallel_size


def stored_weights(path: Path, load_format: str, model: ModelConfig) -> StoredWeights:
    """Return what the files hold; an estimate by config.json for random weights."""
    return StoredWeights.of_config(model) if load_format == "dummy" else StoredWeights.read(path)


def _file_bytes(path: Path) -> int:
    files = [*path.glob("*.safetensors"), *path.glob(f"{LINK_NAME}*")]
    return sum(file.stat().st_size for file in files if file.exists())


def _rounded(num_bytes: float) -> str:
    """Return the size with at most one decimal."""
    unit = 1 << 30 if num_bytes >= 1 << 30 else 1 << 20
    return size_text(round(num_bytes / unit, 1) * unit)
