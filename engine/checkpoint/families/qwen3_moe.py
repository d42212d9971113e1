"""Qwen3 with experts (Yang et al. 2025): the MLPs are mixtures of experts, in all layers or some."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, interleaved_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.windows import switched_window_size
from engine.checkpoint.json_fields import JsonOptions


class Qwen3Moe(Family):
    name = "qwen3_moe"
    gguf_name = "qwen3moe"
    gguf_names_with_pictures = ("qwen3vlmoe",)
    class_names = ("Qwen3MoeForCausalLM",)
    num_kv_heads = 4
    has_head_norm = True

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        """Return the window of each layer: either all layers have one, or none."""
        return (switched_window_size(options, 4096),) * num_layers

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return interleaved_experts(options, num_layers, RoutingDefaults(128, 8, 768))
