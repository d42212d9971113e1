"""Phi-3 and Phi-4 (Microsoft 2024): Mistral with fused projections and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.mistral import Mistral
from engine.checkpoint.json_fields import JsonOptions


class Phi3(Mistral):
    name = "phi3"
    gguf_name = ""
    gguf_options = frozenset(("attention.sliding_window",))
    class_names = ("Phi3ForCausalLM",)
    has_partial_rotary = True
    num_kv_heads = 0
    default_window = 0
    rms_norm_eps = 1e-5
    fused_names = ("qkv_proj", "gate_up_proj")
    other_rope_types = MappingProxyType({"su": "longrope", "yarn": "longrope"})

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"original_max_position_embeddings": 4096}

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {
            "sliding_window": options.count("attention.sliding_window", 0, least=0) or None,
            "original_max_position_embeddings": options.count("rope.scaling.original_context_length", 0, least=0) or None,
        }
