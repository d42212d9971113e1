"""DeepSeek-V2 (DeepSeek-AI 2024): DeepSeek-V3's attention, with experts chosen by softmax scores among all (V2-Lite)."""

from __future__ import annotations

from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.json_fields import JsonOptions

# options that change the choice of experts, and their supported values
_SUPPORTED = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}


class DeepseekV2(DeepseekV3):
    name = "deepseek_v2"
    class_names = ("DeepseekV2ForCausalLM",)
    gguf_name = None
    draft_names = None

    def is_interleaved(self, options: JsonOptions) -> bool:
        return True

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        options.check_supported(_SUPPORTED)
        for name in ("n_group", "topk_group"):
            options.count(name, 1)  # without effect on the greedy choice
        count = num_experts(options, "n_routed_experts", default=64)
        first = options.count("first_k_dense_replace", 0, least=0)
        if not count or first >= num_layers:
            return None
        intermediate_size = options.count("moe_intermediate_size", 1407)
        return ExpertsConfig(
            tuple(range(first, num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 6, count),
            intermediate_size,
            options.count("n_shared_experts", 2, least=0) * intermediate_size,
            factor=options.number("routed_scaling_factor", 1.0),
        )
