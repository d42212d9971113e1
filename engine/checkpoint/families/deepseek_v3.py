"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts in all layers but the first few."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.checkpoint.families.drafts import DEEPSEEK_V3, DraftNames
from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, grouped_experts
from engine.checkpoint.families.family import Biases, Family, Latents
from engine.checkpoint.json_fields import JsonOptions


class DeepseekV3(Family):
    name = "deepseek_v3"
    other_names: tuple[str, ...] = ("kimi_k2",)
    gguf_name: str | None = "deepseek2"
    class_names: tuple[str, ...] = ("DeepseekV3ForCausalLM",)
    model = "workers.models.deepseek_v3:DeepseekV3"
    draft_names: DraftNames | None = DEEPSEEK_V3
    other_option_names: Mapping[str, str] = MappingProxyType({"num_mtp_layers": "num_nextn_predict_layers"})
    harmless_options = frozenset(("head_dim", "qk_head_dim"))
    routing = RoutingDefaults()
    latent_defaults = Latents(query_dim=1536, latent_dim=512, plain_dim=128, rotary_dim=64, value_dim=128)
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
        defaults = self.latent_defaults
        rotary_dim = options.count("qk_rope_head_dim", defaults.rotary_dim)
        if rotary_dim % 2:
            raise options.error("qk_rope_head_dim", f"{rotary_dim} is odd; rotary embeddings need pairs")
        is_plain = "q_lora_rank" in options.values and options.values["q_lora_rank"] is None
        return Latents(
            query_dim=0 if is_plain else options.count("q_lora_rank", defaults.query_dim),
            latent_dim=options.count("kv_lora_rank", defaults.latent_dim),
            plain_dim=options.count("qk_nope_head_dim", defaults.plain_dim),
            rotary_dim=rotary_dim,
            value_dim=options.count("v_head_dim", defaults.value_dim),
        )

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return grouped_experts(options, num_layers, self.routing)
