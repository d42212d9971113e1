"""SmolLM3 (Hugging Face 2025): llama without rotation in every fourth layer."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.rotated_layers import unrotated_layers
from engine.checkpoint.families.windows import layer_windows, switched_window_size
from engine.checkpoint.json_fields import JsonOptions


class SmolLM3(Family):
    name = "smollm3"
    class_names = ("SmolLM3ForCausalLM",)
    num_kv_heads = 4
    harmless_options = frozenset(("no_rope_layer_interval",))  # beside `no_rope_layers`
    is_permuted_in_gguf = True
    rope_theta = 2_000_000.0
    ties_word_embeddings = True

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))

    def unrotated_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return unrotated_layers(options, num_layers)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        window = switched_window_size(options, 0)
        unrotated = self.unrotated_layers(options, num_layers)
        return layer_windows(options, window, [index in unrotated for index in range(num_layers)])
