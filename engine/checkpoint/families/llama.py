"""Llama (Touvron et al. 2023) and models of the same architecture."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class Llama(Family):
    name = "llama"
    class_names = ("LlamaForCausalLM",)
    is_permuted_in_gguf = True

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))
