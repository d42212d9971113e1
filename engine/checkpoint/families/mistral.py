"""Mistral (Jiang et al. 2023): llama with a sliding window in every layer if the config has one."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.windows import window_size
from engine.checkpoint.json_fields import JsonOptions


class Mistral(Family):
    name = "mistral"
    class_names: tuple[str, ...] = ("MistralForCausalLM",)
    num_kv_heads = 8
    gguf_name: str | None = None  # its GGUF files say llama
    default_window = 4096

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(False, False, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return (window_size(options, self.default_window),) * num_layers
