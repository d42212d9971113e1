"""Qwen2 with experts (Yang et al. 2024, Qwen1.5-MoE): beside the experts an MLP for all tokens, multiplied by the sigmoid of a
score."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, interleaved_layers, num_chosen, num_experts
from engine.checkpoint.families.family import Biases
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.families.windows import layer_windows, switched_window_size
from engine.checkpoint.json_fields import JsonOptions


class Qwen2Moe(Qwen2):
    name = "qwen2_moe"
    gguf_name = "qwen2moe"
    class_names = ("Qwen2MoeForCausalLM",)

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("qkv_bias", True), False, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        """Return the windows: without `layer_types`, every second layer of the first `max_window_layers` has one."""
        window = switched_window_size(options, 4096)
        end = options.count("max_window_layers", self.max_window_layers, least=0)
        return layer_windows(options, window, [index % 2 == 0 and index < end for index in range(num_layers)])

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "num_experts", "num_local_experts", default=60)
        sparse = interleaved_layers(options, num_layers)
        if not count:
            return None
        return ExpertsConfig(
            sparse,
            count,
            num_chosen(options, "num_experts_per_tok", 4, count),
            options.count("moe_intermediate_size", 1408),
            options.count("shared_expert_intermediate_size", 5632),
            has_shared_gate=True,
            is_normalized=options.flag("norm_topk_prob", False),
        )
