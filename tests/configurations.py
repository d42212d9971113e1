"""Configurations of engines under test: the options' own defaults, and native ops for the rest."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.options.table import OPTIONS

_RESOLVED = {
    "served_model_name": ("test",),
    "plugins": (),
    "dtype": "float32",
    "load_format": "safetensors",
    "weight_cache_dir": "",
    "kv_cache_dtype": "float32",
    "kv_cache_bytes": 0,
    "device": "cpu",
    "ops": "native",
    "plan": "tape",
    "cpu_kernels": {},
    "threads": 1,
    "tool_call_parser": "none",
    "reasoning_parser": "none",
    "media_processes": 0,  # a model of text alone
    "encoder_cache_size": 0,
    "max_num_batched_encoder_embeds": 0,
    "mm_chunk_tokens": 0,
    "num_max_dispatch_tokens_per_rank": 32,
    "max_cudagraph_capture_size": 0,
    "state_cache_interval": 0,  # no recurrent layers
    "max_loras": 0,  # no adapters
    "max_lora_rank": 0,
}


def engine_config(**fields: Any) -> EngineConfig:
    """Return a configuration: missing options have their defaults, and strings are converted to numbers."""
    options = {
        name: OPTIONS.get(name) or OPTIONS.get(name.removesuffix("_s").removesuffix("_ms"))
        for name in EngineConfig.__struct_fields__
    }
    defaults = {name: option.default for name, option in options.items() if option is not None}
    return msgspec.convert(defaults | _RESOLVED | fields, EngineConfig, strict=False)
