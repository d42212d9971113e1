"""DeepSeek V3 (DeepSeek-AI 2024): experts scored by sigmoids, corrected and chosen within the best groups, beside an MLP that
all tokens share."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.json_fields import JsonOptions

# Options that change what is computed, and the values that are followed here.
_FOLLOWED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class DeepseekV3(Family):
    name = "deepseek_v3"
    gguf_name = "deepseek2"
    class_names = ("DeepseekV3ForCausalLM",)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        for name, followed in _FOLLOWED.items():
            if options.values.get(name) not in (None, followed):
                raise options.error(name, f"{options.values[name]!r} is not supported; supported: {followed!r}")
        count = num_experts(options, "n_routed_experts", "num_local_experts", default=256)
        first = options.count("first_k_dense_replace", 3, least=0)
        if not count or first >= num_layers:
            return None
        groups = options.count("n_group", 8)
        if count % groups:
            raise options.error("n_group", f"{groups} does not divide {count} experts")
        chosen_groups = options.count("topk_group", 4, most=groups)
        intermediate_size = options.count("moe_intermediate_size", 2048)
        return ExpertsConfig(
            tuple(range(first, num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 8, count // groups * chosen_groups),
            intermediate_size,
            options.count("n_shared_experts", 1, least=0) * intermediate_size,
            correction="mlp.gate.e_score_correction_bias",
            correction_shape=(count,),
            scoring="sigmoid",
            is_normalized=options.flag("norm_topk_prob", True),
            added_to_sum=1e-20,
            factor=options.number("routed_scaling_factor", 2.5),
            num_groups=groups,
            num_chosen_groups=chosen_groups,
        )
