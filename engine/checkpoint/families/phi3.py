"""Phi-3 and Phi-4 (Microsoft 2024): Mistral with fused projections and LongRoPE."""

from __future__ import annotations

from types import MappingProxyType

from engine.checkpoint.families.mistral import Mistral


class Phi3(Mistral):
    name = "phi3"
    class_names = ("Phi3ForCausalLM",)
    default_window = 0
    rms_norm_eps = 1e-5
    fused_names = ("qkv_proj", "gate_up_proj")
    other_rope_types = MappingProxyType({"su": "longrope", "yarn": "longrope"})
