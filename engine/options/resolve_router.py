"""Turns the options of a router and what its first engine handed over into the router's configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.cluster.handover import Handover
from engine.config import EngineConfig, SpeculativeConfig
from engine.options.resolve_http import OF_RUNS, SECONDS_OF_RUNS, resolve_http, resolve_keys, resolve_tracing
from engine.options.table import OptionValues
from engine.process.run_directory import new_run_id, runs_root

_SECONDS = (
    *SECONDS_OF_RUNS,
    "peer_silence",
    "peer_timeout",
    "drain_timeout",
)
_SAME = (
    *OF_RUNS,
    "engines",
    "cluster_key_file",
    "max_engines",
    "allow_mixed_kernels",
    "trust_request_chat_template",
)
_OF_THE_ENGINE: dict[str, Any] = {  # what only processes with a model need
    "cluster_listen": "",
    "cluster_checkpoints": (),
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
    "speculative_config": SpeculativeConfig(),
    "kv_cache_bytes": 0,
    "state_bytes": 0,
    "comm_bytes": 0,
    "lora_modules": (),
    "adapter_bytes": 0,
    "weight_cache_dir": "",
    "device_arena_library": "",
    "memory_nodes": (),
    "kv_events_endpoint": "",
}


def resolve_router(options: OptionValues, found: Handover) -> EngineConfig:
    """Return the configuration of a router for the model that an engine handed over. Raises OptionError."""
    values = options.values
    run_id = new_run_id()
    run_dir = values["run_dir"] or str(runs_root() / run_id)
    return msgspec.structs.replace(
        found.config,
        **_OF_THE_ENGINE,
        **resolve_http(options, run_dir),
        **resolve_keys(values),
        **{key: values[key] for key in _SAME},
        **{f"{key}_s": values[key] for key in _SECONDS},
        namespace=found.namespace,
        namespace_without_kernels=found.namespace_without_kernels,
        namespace_facts=found.facts,
        otlp_traces_endpoint=resolve_tracing(values["otlp_traces_endpoint"]),
        run_id=run_id,
        run_dir=run_dir,
    )
