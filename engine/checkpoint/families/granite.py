"""Granite 3 (IBM 2024): llama with four constant factors."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family, Multipliers
from engine.checkpoint.json_fields import JsonOptions


class Granite(Family):
    name = "granite"
    class_names = ("GraniteForCausalLM",)
    gguf_name = None

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))

    def multipliers(self, options: JsonOptions) -> Multipliers:
        return Multipliers(
            embedding=options.number("embedding_multiplier", 1.0),
            residual=options.number("residual_multiplier", 1.0),
            logits=1.0 / options.number("logits_scaling", 1.0, above=0),
            scores=options.number("attention_multiplier", 1.0, above=0),
        )
