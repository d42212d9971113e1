"""GLM-4 0414 (Zhipu AI 2025): norms before and after attention and MLP; half of each head is rotated, in neighbouring pairs."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family, NormNames
from engine.checkpoint.json_fields import JsonOptions


class Glm4(Family):
    name = "glm4"
    class_names = ("Glm4ForCausalLM",)
    has_partial_rotary = True
    num_kv_heads = 2
    is_rotary_interleaved = True
    partial_rotary_factor = 0.5
    rms_norm_eps = 1.5625e-07
    head_dim = 128
    fused_names = ("gate_up_proj",)
    norm_names = NormNames(attended="post_self_attn_layernorm", added="post_mlp_layernorm")

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("attention_bias", True), False, False)
