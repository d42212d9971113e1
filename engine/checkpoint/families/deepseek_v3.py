"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts in all layers but the first few."""

from __future__ import annotations

from engine.checkpoint.families.drafts import DEEPSEEK_V3
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases, Family, Latents
from engine.checkpoint.json_fields import JsonOptions

# options that change the choice or place of experts, and their supported values
_FOLLOWED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class DeepseekV3(Family):
    name = "deepseek_v3"
    gguf_name = "deepseek2"
    class_names = ("DeepseekV3ForCausalLM",)
    model = "workers.models.deepseek_v3:DeepseekV3"
    draft_names = DEEPSEEK_V3
    harmless_options = frozenset(("head_dim", "qk_head_dim"))
    default_draft_layers = 1

    def biases(self, options: JsonOptions) -> Biases:
        """Return the biases: of the projections that compress queries, keys and values, and of the output."""
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)

    def is_interleaved(self, options: JsonOptions) -> bool:
        return options.flag("rope_interleave", True)

    def latents(self, options: JsonOptions) -> Latents:
        num_heads = options.count("num_attention_heads")
        num_kv_heads = options.count("num_key_value_heads", num_heads)
        if num_kv_heads != num_heads:
            raise options.error(
                "num_key_value_heads",
                f"{num_kv_heads} should equal num_attention_heads, {num_heads}",
            )
        rotary_dim = options.count("qk_rope_head_dim", 64)
        if rotary_dim % 2:
            raise options.error("qk_rope_head_dim", f"{rotary_dim} is odd; rotary embeddings need pairs")
        is_plain = "q_lora_rank" in options.values and options.values["q_lora_rank"] is None
        return Latents(
            query_dim=0 if is_plain else options.count("q_lora_rank", 1536),
            latent_dim=options.count("kv_lora_rank", 512),
            plain_dim=options.count("qk_nope_head_dim", 128),
            rotary_dim=rotary_dim,
            value_dim=options.count("v_head_dim", 128),
        )

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
