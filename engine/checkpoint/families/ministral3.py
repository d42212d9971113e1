"""Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position, as in Llama 4."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.family import QueryScaling
from engine.checkpoint.families.mistral import Mistral
from engine.checkpoint.json_fields import JsonOptions


class Ministral3(Mistral):
    name = "ministral3"
    gguf_name = None
    gguf_names_with_pictures = ("mistral3",)
    gguf_options = frozenset(("attention.temperature_scale",))
    is_permuted_in_gguf = True
    class_names = ("Ministral3ForCausalLM",)
    harmless_options = frozenset(("max_position_embeddings",))  # in the rope parameters, beside the one that is read
    default_window = 0
    rms_norm_eps = 1e-5
    head_dim = 128
    default_rope = MappingProxyType(
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    )

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {"sliding_window": None}

    def rope_of_gguf(self, options: JsonOptions) -> dict[str, Any]:
        return {"llama_4_scaling_beta": options.number("attention.temperature_scale", 0.0)}

    def query_scaling(self, options: JsonOptions, rope: JsonOptions, *, is_rotated: bool) -> QueryScaling | None:
        beta = rope.number("llama_4_scaling_beta", 0.0)
        positions = options.count("max_position_embeddings", 0, least=0) or None  # transformers takes these if it is left out
        return QueryScaling(beta, rope.count("original_max_position_embeddings", positions)) if beta else None
