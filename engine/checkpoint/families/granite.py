"""Granite 3 (IBM 2024): llama with four constant factors."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.family import Biases, Family, Multipliers
from engine.checkpoint.json_fields import JsonOptions


class Granite(Family):
    name = "granite"
    class_names: tuple[str, ...] = ("GraniteForCausalLM",)
    gguf_options = frozenset(("embedding_scale", "residual_scale", "attention.scale", "logit_scale"))
    is_permuted_in_gguf = True

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {
            "embedding_multiplier": options.number("embedding_scale", 1.0),
            "residual_multiplier": options.number("residual_scale", 1.0),
            "attention_multiplier": options.number("attention.scale", 1.0),
            "logits_scaling": options.number("logit_scale", 1.0),
        }

    def multipliers(self, options: JsonOptions) -> Multipliers:
        return Multipliers(
            embedding=options.number("embedding_multiplier", 1.0),
            residual=options.number("residual_multiplier", 1.0),
            logits=1.0 / options.number("logits_scaling", 1.0, above=0),
            scores=options.number("attention_multiplier", 1.0, above=0),
        )
