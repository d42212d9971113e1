"""DeepSeek-V2 (DeepSeek-AI 2024): DeepSeek-V3's attention, with experts chosen by softmax scores, among all (V2-Lite) or in the
best groups."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases
from engine.checkpoint.json_fields import JsonOptions

# options that change the choice of experts, and their supported values
_SUPPORTED = {"scoring_func": "softmax", "moe_layer_freq": 1}


class DeepseekV2(DeepseekV3):
    name = "deepseek_v2"
    class_names = ("DeepseekV2ForCausalLM",)
    gguf_name = "deepseek2"  # like V3; `gguf/convert.py` tells them apart by the scores of experts
    draft_names = None
    # transformers reads norm_topk_prob, but does not apply it
    harmless_options = DeepseekV3.harmless_options | {"norm_topk_prob"}
    other_option_names = MappingProxyType({"num_experts": "n_routed_experts"})

    def biases(self, options: JsonOptions) -> Biases:
        return msgspec.structs.replace(super().biases(options), mlp=options.flag("mlp_bias", False))

    def is_interleaved(self, options: JsonOptions) -> bool:
        return True

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        options.check_supported(_SUPPORTED)
        count = num_experts(options, "n_routed_experts", default=64)
        first = options.count("first_k_dense_replace", 0, least=0)
        if not count:
            return None
        groups, chosen_groups = self.groups(options, count)
        intermediate_size = options.count("moe_intermediate_size", 1407)
        return ExpertsConfig(
            tuple(range(first, num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 6, count // groups * chosen_groups),
            intermediate_size,
            options.count("n_shared_experts", 2, least=0) * intermediate_size,
            factor=options.number("routed_scaling_factor", 1.0),
            num_groups=groups,
            num_chosen_groups=chosen_groups,
            num_best=1,
        )

    def groups(self, options: JsonOptions, num_experts: int) -> tuple[int, int]:
        """Return the number of groups, and of chosen ones; the greedy choice has no groups."""
        method, groups = options.text("topk_method", "greedy"), options.count("n_group", 1)
        chosen_groups = options.count("topk_group", 1)
        if method == "greedy":
            return 1, 1
        if method != "group_limited_greedy":
            raise options.error("topk_method", f"{method!r} is not supported; supported: 'greedy', 'group_limited_greedy'")
        if num_experts % groups:
            raise options.error("n_group", f"{groups} does not divide {num_experts} experts")
        if chosen_groups > groups:
            raise options.error("topk_group", f"{chosen_groups} groups should be chosen, but only {groups} exist")
        return groups, chosen_groups
