"""Qwen2 (Yang et al. 2024): llama with biases on queries, keys and values, and sliding windows in the upper layers if the
config has them."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.windows import layer_windows, switched_window_size
from engine.checkpoint.json_fields import JsonOptions


class Qwen2(Family):
    name = "qwen2"
    class_names: tuple[str, ...] = ("Qwen2ForCausalLM",)
    num_kv_heads = 32
    gguf_names_with_pictures = ("qwen2vl",)
    max_window_layers: int = 28  # if missing in config.json

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(options.flag("attention_bias", options.flag("qkv_bias", True)), False, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        window = switched_window_size(options, 4096)
        first = options.count("max_window_layers", self.max_window_layers, least=0)
        return layer_windows(options, window, [index >= first for index in range(num_layers)])
