"""MiniMax-M2 (MiniMax 2025): experts with sigmoid scores and a correction in every layer; all queries of a token are normalized
as one, and so are all keys."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class MiniMaxM2(Family):
    name = "minimax_m2"
    class_names = ("MiniMaxM2ForCausalLM",)
    has_partial_rotary = True
    num_kv_heads = 8
    gguf_name = "minimax-m2"
    head_dim = 128
    has_wide_norm = True
    rope_theta = 5_000_000.0
    harmless_options = frozenset(
        (
            *("use_qk_norm", "qk_norm_type", "use_routing_bias", "attn_type_list", "mlp_intermediate_size"),
            *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "shared_moe_mode", "shared_intermediate_size"),
            "use_grouped_topk",  # experts are not in groups here
        )
    )

    def biases(self, options: JsonOptions) -> Biases:
        options.check_supported({f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")})
        options.check_supported({"swa_rope_theta": -1.0, "routed_scaling_factor": 1.0, "num_expert_group": None})
        return Biases(False, False, False)

    def rotary_share(self, options: JsonOptions) -> float:
        head_dim = options.count("head_dim", self.head_dim)
        return options.count("rotary_dim", 0) / head_dim or super().rotary_share(options)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        options.check_supported({"scoring_func": "sigmoid"})
        count = num_experts(options, "num_local_experts", "num_experts", default=256)
        return ExpertsConfig(
            tuple(range(num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 8, count),
            options.count("intermediate_size", 1536),
            correction="mlp.e_score_correction_bias",
            correction_shape=(count,),
            scoring="sigmoid",
            is_normalized=True,
        )
