"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts in all layers but the first few."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family, Latents
from engine.checkpoint.json_fields import JsonOptions


class DeepseekV3(Family):
    name = "deepseek_v3"
    class_names = ("DeepseekV3ForCausalLM",)
    model = "workers.models.deepseek_v3:DeepseekV3"

    def biases(self, options: JsonOptions) -> Biases:
        """Of what compresses queries, keys and values, and of the output."""
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
                f"{num_kv_heads} should be num_attention_heads, {num_heads}: all heads have their own",
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

    def num_draft_layers(self, options: JsonOptions) -> int:
        return options.count("num_nextn_predict_layers", 1, least=0)
