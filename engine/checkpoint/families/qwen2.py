"""Qwen2 (Yang et al. 2024): llama with biases on queries, keys and values, and sliding windows in the upper layers if the
config has them."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class Qwen2(Family):
    name = "qwen2"
    class_names: tuple[str, ...] = ("Qwen2ForCausalLM",)
    max_window_layers: int = 28  # if missing in config.json

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("attention_bias", options.flag("qkv_bias", True)), False, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        window = options.count("sliding_window", 0 if options.values.get("sliding_window", 0) is None else 4096)
        if not options.flag("use_sliding_window", False):
            window = 0
        layer_types = options.texts("layer_types")
        if options.values.get("layer_types") is None:
            first = options.count("max_window_layers", self.max_window_layers, least=0)
            return tuple(window if index >= first else 0 for index in range(num_layers))
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            raise options.error(
                "layer_types",
                f"{list(layer_types)} should be {num_layers} entries, each 'full_attention' or 'sliding_attention'",
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
