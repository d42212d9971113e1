"""Qwen3-VL with experts (Qwen team 2025): Qwen3-VL, with mixtures of experts in place of MLPs in all layers or some."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, interleaved_layers, num_chosen, num_experts
from engine.checkpoint.families.qwen3_vl import Qwen3VL
from engine.checkpoint.json_fields import JsonOptions


class Qwen3VLMoe(Qwen3VL):
    name = "qwen3_vl_moe"
    class_names = ("Qwen3VLMoeForConditionalGeneration",)
    num_kv_heads = 16
    harmless_options = frozenset(("norm_topk_prob",))  # weights are always normalized
    head_dim = 0

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "num_experts", "num_local_experts", default=60)
        sparse = interleaved_layers(options, num_layers)
        if not count:
            return None
        chosen = num_chosen(options, "num_experts_per_tok", 4, count)
        return ExpertsConfig(sparse, count, chosen, options.count("moe_intermediate_size", 1408), is_normalized=True)
