"""GLM-4.5 to 4.7 (Zhipu AI 2025): DeepSeek-V3's experts and draft layer, attention with half of each head rotated; some have
Qwen3's head norms. GLM-4.7-Flash has latent attention."""

from __future__ import annotations

from types import MappingProxyType

from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.drafts import DEEPSEEK_V3
from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, grouped_experts
from engine.checkpoint.families.family import Biases, Family, Latents
from engine.checkpoint.json_fields import JsonOptions


class Glm4Moe(Family):
    name = "glm4_moe"
    class_names = ("Glm4MoeForCausalLM",)
    has_partial_rotary = True
    num_kv_heads = 8
    gguf_name = "glm4moe"
    gguf_names = MappingProxyType({"post_attention_norm": "post_attention_layernorm"})
    head_norm_option = "use_qk_norm"
    other_option_names = DeepseekV3.other_option_names
    partial_rotary_factor = 0.5
    rms_norm_eps = 1e-5
    draft_names = DEEPSEEK_V3
    default_draft_layers = 1

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("attention_bias", False), False, False)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        defaults = RoutingDefaults(128, 8, 1408, num_groups=1, num_chosen_groups=1, factor=1.0, first_sparse_layer=1)
        return grouped_experts(options, num_layers, defaults)


class Glm4MoeLite(DeepseekV3):
    name = "glm4_moe_lite"
    class_names = ("Glm4MoeLiteForCausalLM",)
    has_partial_rotary = True
    gguf_name = None  # its GGUF files say deepseek2, and are read as DeepSeek-V3
    rms_norm_eps = 1e-5
    routing = RoutingDefaults(64, 4, 1536, num_groups=1, num_chosen_groups=1, factor=1.8, first_sparse_layer=1)
    latent_defaults = Latents(query_dim=768, latent_dim=512, plain_dim=192, rotary_dim=64, value_dim=256)
