"""Turns option values into the frozen EngineConfig and ModelRecord: checks options against the model, the machine and each
other.

Called once by `engine/supervisor/launch.py`. Nothing is "auto" or missing afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.comm_spec import comm_bytes
from engine.checkpoint.families import FAMILIES
from engine.checkpoint.gguf.parts import stem_of
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.local import local_checkpoint
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.checkpoint.stored_weights import StoredWeights
from engine.config import EngineConfig, PoolingConfig
from engine.errors import CheckpointError, OptionError, TooLargeError
from engine.kv_groups import KvGroup, longest_sequence, num_moving, num_pages
from engine.options.idle import note_idle
from engine.options.resolve_captures import resolve_captures
from engine.options.resolve_cluster import resolve_cluster
from engine.options.resolve_device import (
    ARENA_LIBRARIES,
    AskPaddle,
    asking_paddle,
    resolve_device,
    resolve_ops,
    resolve_plan,
)
from engine.options.resolve_drafts import check_drafts, choose_drafts
from engine.options.resolve_encoder import resolve_encoder
from engine.options.resolve_files import with_files, with_revision
from engine.options.resolve_http import OF_RUNS, SECONDS_OF_RUNS, resolve_http, resolve_keys, resolve_tracing
from engine.options.resolve_lora import resolve_lora
from engine.options.resolve_media import resolve_media
from engine.options.resolve_memory import LEAST_TOKENS, affordable_cache_bytes, check_memory, note_quantization
from engine.options.resolve_parsers import resolve_parsers
from engine.options.resolve_pooling import resolve_pooling, resolve_whole_prompts
from engine.options.resolve_ranks import resolve_dispatch_rows, resolve_ranks, resolve_threads
from engine.options.resolve_states import resolve_states
from engine.options.resolve_weights import (
    cache_directory,
    processor_flags,
    quantizations,
    resolve_cache_directory,
    resolve_calibration,
    resolve_dtype,
    resolve_group_size,
)
from engine.options.table import OptionValues
from engine.process.nodes import memory_nodes
from engine.process.run_directory import new_run_id, runs_root
from shm.memory import available_memory_bytes
from shm.sizes import size_text

EMBEDDED_MODEL_NAMES = {"text": "tokamak-demo", "vision": "tokamak-demo-vision"}
MAX_DEFAULT_CACHE_BYTES = 1 << 30
_SECONDS = (
    *SECONDS_OF_RUNS,
    "max_priority_wait",
)
_SAME = (
    *OF_RUNS,
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "max_logprobs",
    "max_grammar_bytes",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "expert_placement_strategy",
    "ep_batched_token_timeout_ms",
    "ep_mixed_steps",
    "enable_eplb",
    "eplb_config",
    "speculative_config",
    "allow_variant_ops",
    "kv_events_endpoint",
    "seed",
    "weight_cache_limit",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
)


# requested variant (or "auto"), type of keys and values, directory of the result -> variant of each part
ChooseKernels = Callable[[str, str, Path], dict[str, str]]


def as_built(asked: str, kv_cache_dtype: str, directory: Path) -> dict[str, str]:
    """Return the kernels if they are not measured."""
    return {} if asked == "auto" else {"base": asked}


def resolve(
    options: OptionValues,
    flags: frozenset[str] | None = None,
    choose_kernels: ChooseKernels = as_built,
    ask_paddle: AskPaddle | None = None,
) -> tuple[EngineConfig, ModelRecord]:
    """Return the configuration for `options`, and the metadata read from the checkpoint. Raises OptionError if options
    contradict each other, the model or the machine; automatic choices that may surprise are added to `options.notes`. `flags`
    are the processor's; None: this machine's. `ask_paddle` returns the installed Paddle and GPUs; None: this machine's."""
    if ask_paddle is None:
        ask_paddle = asking_paddle(options.values["device"], options.values["ops"])
    if not options.values["plugins"]:
        return _resolved(options, flags, choose_kernels, ask_paddle)
    from engine.plugins import load_plugins, naming_plugins

    load_plugins(options.values["plugins"])
    with naming_plugins():
        return _resolved(options, flags, choose_kernels, ask_paddle)


def _resolved(
    options: OptionValues, flags: frozenset[str] | None, choose_kernels: ChooseKernels, ask_paddle: AskPaddle
) -> tuple[EngineConfig, ModelRecord]:
    values = options.values
    model_path = _model_path(options)
    try:
        record = with_files(options, ModelRecord.read(model_path))
    except CheckpointError as error:
        raise _model_error(values["model"] or model_path, error) from error
    _check_config(record, values["ignore_config_keys"] or ())
    if record.config.lacks_encoder:
        options.notes.append(
            f"{values['model']} is served for text only: pictures of {record.config.architecture} are not supported"
            if FAMILIES[record.config.architecture].has_unread_encoder
            else f"{values['model']} has the text model only: pictures need the model's safetensors checkpoint"
        )
    pooling, record = _pooling(values, record)
    model = record.config
    num_ranks = resolve_ranks(options, model)
    ask = functools.cache(ask_paddle)
    try:
        device = resolve_device(values["device"], values["ops"], num_ranks, ask)
    except OptionError as error:
        card_bytes = ask().memory.get(values["device"], 0) if values["device"] in ARENA_LIBRARIES else 0
        if not (shortage := _shortage(values, record, model_path, card_bytes)):
            raise
        raise OptionError(f"{error}. Also missing: {shortage}") from error
    allows_variant = values["allow_variant_ops"]
    ops = resolve_ops(values["ops"], device, num_ranks, ask, allows_variant=allows_variant)
    dtype = resolve_dtype(values["dtype"], ops, processor_flags() if flags is None else flags, values["cpu_kernels"])
    parts = _Parts(model_path, record, pooling, device, ops, dtype, num_ranks, ask, choose_kernels)
    *others, last = quantizations(values["quantization"], ops, model, model_path)
    for quantization in others:
        with contextlib.suppress(TooLargeError):
            return _configured(options, quantization, parts, checks_memory=True), record
    return _configured(options, last, parts, checks_memory=values["check_memory"]), record


def _shortage(values: dict[str, Any], record: ModelRecord, path: Path, card_bytes: int) -> str:
    """Return what memory a device lacks for weights, a step and a small cache; empty: nothing, or it is not known."""
    from engine.options.resolve_card import card_shortage  # needed only with a device

    model = record.config
    spec = KVCacheSpec.of(model, values["block_size"], "float32")
    limit = min(values["max_model_len"] or model.max_position_embeddings, model.max_position_embeddings)
    return card_shortage(card_bytes, values, model, StoredWeights.read(path).num_values, limit, spec)


class _Parts(msgspec.Struct, frozen=True):
    """Results that do not depend on the quantization."""

    path: Path
    record: ModelRecord
    pooling: PoolingConfig | None
    device: str
    ops: str
    dtype: str
    num_ranks: int
    ask_paddle: AskPaddle
    choose_kernels: ChooseKernels


def _configured(given: OptionValues, quantization: str, parts: _Parts, *, checks_memory: bool) -> EngineConfig:
    """Return the configuration with this quantization; values and notes of `given` are then those of it. Raises TooLargeError
    if the engine does not fit into memory."""
    options = msgspec.structs.replace(given, values=given.values | {"quantization": quantization}, notes=list(given.notes))
    values, record, pooling, model_path = options.values, parts.record, parts.pooling, parts.path
    device, ops, dtype, model = parts.device, parts.ops, parts.dtype, record.config
    is_narrow = dtype != "float32" or quantization != "none" or model.quantization is not None
    kv_cache_dtype = _kv_cache_dtype(values["kv_cache_dtype"], ops, model, has_narrow_weights=is_narrow)
    choose_drafts(options, model, ops, is_pooling=pooling is not None)
    check_drafts(values, model, model_path)
    kv_cache = KVCacheSpec.of(model, values["block_size"], kv_cache_dtype, values["speculative_config"].has_mtp)
    longest = model.max_position_embeddings
    if pooling is not None and pooling.max_tokens:
        longest = min(longest, pooling.max_tokens)
    limit = _model_length(values["max_model_len"] or None, longest)
    if pooling is not None and pooling.is_whole:
        limit = resolve_whole_prompts(options, limit, model)
    groups = kv_cache.groups
    if pooling is not None and pooling.needs_all_tokens:  # after a worker's death all tokens are computed again
        groups = tuple(KvGroup(0, group.num_tables) for group in groups)
    plan = resolve_plan(values["plan"], ops, device)
    captures = resolve_captures(options, plan)
    served_names = tuple(values["served_model_name"] or _model_names(options, model_path))
    lora = resolve_lora(options, model, device, ops, served_names)
    card_bytes = 0 if device == "cpu" else parts.ask_paddle().memory.get(device, 0)
    is_card_filled = card_bytes > 0 and not is_cache_asked(values)
    if not is_card_filled:
        longest_blocks = _blocks_for(values, groups, limit)
        num_kv_blocks = _num_kv_blocks(values, longest_blocks, kv_cache.bytes_per_block)
    if card_bytes:
        from engine.options.resolve_card import card_blocks, card_needs, check_card  # needed only with a device

        largest = captures["max_cudagraph_capture_size"]
        num_values = StoredWeights.read(model_path).num_values
        value_bytes = 2 if dtype == "bfloat16" else 4
        adapter_bytes = lora.get("adapter_bytes", 0) - lora.get("adapter_expert_bytes", 0)
        needs = card_needs(model, num_values, values, limit, largest, kv_cache.num_tables, value_bytes, adapter_bytes)
        if is_card_filled:
            num_kv_blocks = card_blocks(card_bytes, values["gpu_memory_utilization"], needs, kv_cache.bytes_per_block)
        elif checks_memory:
            check_card(card_bytes, needs, kv_cache.arena_bytes(num_kv_blocks))
    note_idle(options, model, device, is_cache_asked=is_cache_asked(values), is_card_known=is_card_filled)
    _check_draft_budget(values["speculative_config"].max_drafts, values["max_num_batched_tokens"])
    chat_template = _template(values["chat_template"])
    if values["log_requests"] and values["log_level"] in ("warning", "error"):
        options.notes.append(
            f"--log-requests has no effect: requests are logged at level info, but --log-level is {values['log_level']}"
        )
    run_id = new_run_id()
    run_dir = values["run_dir"] or str(runs_root() / run_id)
    tensor_ranks = values["tensor_parallel_size"]
    nodes = tuple(map(tuple, memory_nodes(os.sched_getaffinity(0)))) if values["bind_memory_nodes"] else ()
    config = EngineConfig(
        model=str(model_path),
        served_model_name=served_names,
        dtype=dtype,
        quantization=quantization,
        quantization_group_size=resolve_group_size(options, quantization),
        **resolve_calibration(options, quantization),
        weight_cache_dir=resolve_cache_directory(options, ops),
        max_model_len=limit,
        pooling=pooling,
        load_format="safetensors" if values["load_format"] == "auto" else values["load_format"],
        chat_template=chat_template,
        **resolve_parsers(values, record, chat_template),
        plugins=tuple(values["plugins"]),
        trust_request_chat_template=values["trust_request_chat_template"],
        num_kv_blocks=num_kv_blocks,
        kv_groups=groups,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_bytes=kv_cache.arena_bytes(num_kv_blocks),
        **resolve_states(options, model, device, kv_cache, num_kv_blocks, limit),
        device=device,
        device_arena_library=ARENA_LIBRARIES.get(device, ""),
        ops=ops,
        plan=plan,
        **captures,
        is_cache_estimated=is_card_filled,
        cpu_kernels=_kernels(options, ops, kv_cache_dtype, parts.choose_kernels),
        memory_nodes=nodes,
        threads=resolve_threads(options, parts.num_ranks, nodes),
        comm_bytes=comm_bytes(
            model,
            tensor_ranks,
            parts.num_ranks,
            values["max_num_batched_tokens"],
            values["max_num_seqs"],
            values["enable_expert_parallel"],
            values["speculative_config"].max_drafts,
        ),
        **resolve_http(options, run_dir),
        **lora,
        otlp_traces_endpoint=resolve_tracing(values["otlp_traces_endpoint"]),
        **resolve_encoder(values, model),
        **resolve_media(options, record, limit, ops),
        num_max_dispatch_tokens_per_rank=resolve_dispatch_rows(options),
        run_id=run_id,
        run_dir=run_dir,
        **resolve_keys(values),
        **resolve_cluster(values, model_path),
        **{key: values[key] for key in _SAME},
        **{f"{key}_s": values[key] for key in _SECONDS},
        max_step_time_ms=values["max_step_time"],
    )
    if values["max_model_len"] == 0 and not is_cache_asked(values) and not is_card_filled:
        num_kv_blocks = _automatic_blocks(values, config, model, kv_cache.bytes_per_block, groups, num_kv_blocks)
    config = msgspec.structs.replace(
        config,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache.arena_bytes(num_kv_blocks),
        max_model_len=_fitting_length(options, limit, groups, num_kv_blocks),
    )
    if given.values["quantization"] == "auto":
        note_quantization(options, config, model)
    if checks_memory:
        check_memory(options, config, model)
    given.values, given.notes = values, options.notes
    return config


# ------------------------------------------------------------------------------------------------------------- model


def _pooling(values: dict[str, Any], record: ModelRecord) -> tuple[PoolingConfig | None, ModelRecord]:
    try:
        return resolve_pooling(values, record)
    except CheckpointError as error:
        raise _model_error(values["model"], error) from error


def _check_config(record: ModelRecord, ignored: Sequence[str]) -> None:
    unknown = {name: value for name, value in record.config.unknown_options.items() if name not in ignored}
    if unknown:
        listed = ", ".join(f"{name} {value!r}" for name, value in unknown.items())
        raise OptionError(
            f"--model {record.path}: config.json has options that are not supported for {record.config.architecture} and may "
            f"change its answers: {listed}; --ignore-config-keys {','.join(unknown)} serves it without them"
        )


def _model_error(name: str | Path, error: CheckpointError) -> OptionError:
    """Return the error of a checkpoint, naming the model once: most errors begin with its name or one of its files."""
    text = str(error)
    return OptionError(f"--model {text}" if text.startswith((str(name), "/")) else f"--model {name}: {text}")


def _model_path(options: OptionValues) -> Path:
    name, demo = options.values["model"], options.values["demo"]
    revision = options.values["revision"]
    if name is None and demo not in options.embedded_models:
        raise OptionError("--model: no model is given; pass a checkpoint directory, a .gguf file or owner/model")
    if name is None:
        return Path(options.embedded_models[demo])
    if "demo" in options.given:
        raise OptionError(f"--demo {demo} and --model {name} choose different models; remove one of them")
    try:
        found = local_checkpoint(name)
        if found is not None:
            if revision:
                raise OptionError(f"--revision {revision}: {name} is a local path and has no revisions; remove --revision")
            return found
        return resolve_model(with_revision(name, revision), options.values["hub"])
    except CheckpointError as error:
        raise _model_error(name, error) from error


def _model_names(options: OptionValues, path: Path) -> tuple[str, ...]:
    """Return the model's own name, and the name as typed: clients of vLLM use the latter."""
    given = options.values["model"]
    for demo, embedded in options.embedded_models.items():
        if str(path) == embedded:
            return tuple(dict.fromkeys((EMBEDDED_MODEL_NAMES[demo], *filter(None, [given]))))
    local = Path(given).expanduser()
    own = stem_of(local.name) if local.is_file() else path.name if local.exists() else given
    return tuple(dict.fromkeys((own, given)))


def _model_length(asked: int | None, limit: int) -> int:
    if asked is not None and asked > limit:
        raise OptionError(
            f"--max-model-len {asked} exceeds the limit of the model, max_position_embeddings {limit}; lower it to at most that"
        )
    return asked or limit


def _template(given: str) -> str:
    """Return the template's text; for a file its content."""
    if not given or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text()
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(f"--chat-template {given} is neither a template nor a readable file: {error}") from error


# ------------------------------------------------------------------------------------------------------------- cache


def _kv_cache_dtype(asked: str, ops: str, model: ModelConfig, *, has_narrow_weights: bool) -> str:
    """Return the type of keys and values for `asked`. Heads with an odd number of elements need float32."""
    if ops not in ("native", "cuda"):
        if asked not in ("auto", "float32"):
            raise OptionError(
                f"--kv-cache-dtype {asked} needs native ops (--ops cuda on GPUs), but the ops are {ops}, which "
                "support only float32; use --kv-cache-dtype float32"
            )
        return "float32"
    dims = [model.head_dim, *(shape.head_dim for shape in model.layer_shapes)] if model.latents is None else []
    odd = next((dim for dim in dims if dim % 2), 0)
    if asked == "auto":
        return "bfloat16" if has_narrow_weights and not model.is_bidirectional and not odd else "float32"
    if odd and asked != "float32":
        raise OptionError(
            f"--kv-cache-dtype {asked} needs heads with an even number of elements, but head_dim is {odd}; use "
            "--kv-cache-dtype float32"
        )
    return asked


def is_cache_asked(values: dict[str, Any]) -> bool:
    return values["num_kv_blocks"] is not None or values["kv_cache_memory"] is not None


def _blocks_for(values: dict[str, Any], groups: Sequence[KvGroup], num_tokens: int) -> int:
    """Return how many blocks, each in all layers, a sequence holds at most."""
    pages = num_pages(groups, num_tokens, values["block_size"], _num_moving(values))
    return math.ceil(pages / sum(group.num_tables for group in groups))


def _num_moving(values: dict[str, Any]) -> int:
    return num_moving(values["max_num_batched_tokens"], values["speculative_config"].num_overlap)


def _num_kv_blocks(values: dict[str, Any], longest_blocks: int, block_bytes: int) -> int:
    """Return the number of usable blocks: as given, else enough for a full batch of the longest sequences (`longest_blocks`
    each) within the default limits, reduced by the memory of drafters."""
    if values["num_kv_blocks"] is not None:
        return int(values["num_kv_blocks"])
    if values["kv_cache_memory"] is not None:
        num_blocks = values["kv_cache_memory"] // block_bytes - 1
        if num_blocks < 1:
            raise OptionError(
                f"--kv-cache-memory {size_text(values['kv_cache_memory'])} is too small: it holds {num_blocks + 1} "
                f"blocks of {size_text(block_bytes)}, at least 2 are needed (one is reserved); use at least "
                f"{2 * block_bytes} bytes"
            )
        return int(num_blocks)
    wanted: int = values["max_num_seqs"] * longest_blocks
    index_bytes, token_bytes = values["speculative_config"].index_bytes
    most = min(MAX_DEFAULT_CACHE_BYTES, available_memory_bytes() // 4 // values["data_parallel_size"])
    affordable: int = (most - index_bytes) // (block_bytes + values["block_size"] * token_bytes) - 1
    return max(1, min(wanted, affordable))


def _automatic_blocks(
    values: dict[str, Any], config: EngineConfig, model: ModelConfig, block_bytes: int, groups: Sequence[KvGroup], default: int
) -> int:
    """Return the number of blocks for `--max-model-len auto`: enough for the longest sequence if there is room, and fewer than
    the default if it does not fit."""
    block_bytes += values["block_size"] * values["speculative_config"].index_bytes[1]
    limit = config.max_model_len
    room = affordable_cache_bytes(config, model) // block_bytes - 1
    if room < default and affordable_cache_bytes(config, model, share=1.0) // block_bytes - 1 >= default:
        return default
    if room < min(default, _blocks_for(values, groups, min(limit, LEAST_TOKENS))):
        return default  # too little: the check reports it
    return min(room, max(default, _blocks_for(values, groups, limit)))


def _fitting_length(options: OptionValues, limit: int, groups: Sequence[KvGroup], num_kv_blocks: int) -> int:
    """Return the longest sequence: the model's own limit, lowered to what the cache holds. A limit given by the user stays: the
    scheduler then rejects only those requests that can never fit."""
    values = options.values
    pages = num_kv_blocks * sum(group.num_tables for group in groups)
    room = longest_sequence(groups, pages, values["block_size"], _num_moving(values), limit)
    if limit <= room:
        return limit
    needed = _blocks_for(values, groups, limit)
    is_asked = bool(values["max_model_len"])
    options.notes.append(
        f"{num_kv_blocks} KV blocks hold {room} tokens, but "
        f"{f'--max-model-len {limit}' if is_asked else f'the limit {limit} of the model'} needs {needed} "
        "blocks; longer requests are rejected (see --num-kv-blocks, --kv-cache-memory)"
    )
    return limit if is_asked else int(room)


def _check_draft_budget(max_drafts: int, max_num_tokens: int) -> None:
    if max_drafts and max_num_tokens < 1 + max_drafts:
        raise OptionError(
            f"--speculative-config: a sequence needs {1 + max_drafts} tokens per step (1 and "
            f"num_speculative_tokens {max_drafts}), more than --max-num-batched-tokens {max_num_tokens}; raise "
            f"that to at least {1 + max_drafts}, or lower num_speculative_tokens"
        )


# ----------------------------------------------------------------------------------------------------------- machine


def _kernels(options: OptionValues, ops: str, kv_cache_dtype: str, choose: ChooseKernels) -> dict[str, str]:
    asked = options.values["cpu_kernels"]
    if ops == "native":
        return choose(asked, kv_cache_dtype, cache_directory(options))
    if asked != "auto":
        raise OptionError(f"--cpu-kernels {asked} needs native ops, but the ops are {ops}; remove it")
    return {}
