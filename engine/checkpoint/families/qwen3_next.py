"""Qwen3-Next (Qwen team 2025): three of four layers are recurrent and follow the gated delta rule; the others have attention
with a gate for each output. Experts in all layers or some."""

from __future__ import annotations

import msgspec

from engine.checkpoint.families.drafts import QWEN3
from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, interleaved_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.recurrence import Recurrence, gated_delta
from engine.checkpoint.json_fields import JsonOptions


class Qwen3Next(Family):
    name = "qwen3_next"
    gguf_name: str | None = None
    class_names: tuple[str, ...] = ("Qwen3NextForCausalLM",)
    model = "workers.models.qwen3_next:Qwen3Next"
    norm_offset = 1.0
    num_kv_heads = 2
    head_dim = 256
    has_head_norm = True
    has_query_gate = True
    has_partial_rotary = True
    partial_rotary_factor = 0.25
    draft_names = QWEN3

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        return gated_delta(options, num_layers)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        experts = interleaved_experts(options, num_layers, RoutingDefaults(512, 10, 512))
        if experts is None:
            return None
        return msgspec.structs.replace(
            experts,
            shared_intermediate_size=options.count("shared_expert_intermediate_size", 512),
            has_shared_gate=True,
            is_normalized=options.flag("norm_topk_prob", True),
        )
