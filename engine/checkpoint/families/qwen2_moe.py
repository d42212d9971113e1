"""Qwen2 with experts (Yang et al. 2024, Qwen1.5-MoE): beside the experts an MLP for all tokens, multiplied by the sigmoid of a
score."""

from __future__ import annotations

import msgspec

from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, interleaved_experts
from engine.checkpoint.families.family import Biases
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.families.windows import layer_windows, switched_window_size
from engine.checkpoint.json_fields import JsonOptions


class Qwen2Moe(Qwen2):
    name = "qwen2_moe"
    gguf_name = "qwen2moe"
    class_names = ("Qwen2MoeForCausalLM",)
    num_kv_heads = 16

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("qkv_bias", True), False, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        """Return the windows: without `layer_types`, every second layer of the first `max_window_layers` has one."""
        window = switched_window_size(options, 4096)
        end = options.count("max_window_layers", self.max_window_layers, least=0)
        return layer_windows(options, window, [index % 2 == 0 and index < end for index in range(num_layers)])

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        experts = interleaved_experts(options, num_layers, RoutingDefaults(60, 4, 1408))
        if experts is None:
            return None
        width = options.count("shared_expert_intermediate_size", 5632)
        return msgspec.structs.replace(experts, shared_intermediate_size=width, has_shared_gate=True)
