"""Seed-OSS (ByteDance 2025): llama with biases on queries, keys and values."""

from __future__ import annotations

from types import MappingProxyType

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class SeedOss(Family):
    name = "seed_oss"
    class_names = ("SeedOssForCausalLM",)
    num_kv_heads = 8
    gguf_names = MappingProxyType({"post_attention_norm": "post_attention_layernorm"})
    head_dim = 128

    def biases(self, options: JsonOptions) -> Biases:
        flag = options.flag
        return Biases(flag("attention_bias", True), flag("attention_out_bias", False), flag("mlp_bias", False))
