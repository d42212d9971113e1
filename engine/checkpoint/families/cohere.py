"""Command R (Cohere 2024): LayerNorms without bias, in Command R+ also of each head; attention and MLP side by side. Command
R7B and Command A (Cohere 2) have sliding windows in most layers, and rotate only those."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.family import Biases, Family, Multipliers, NormNames
from engine.checkpoint.families.windows import all_but_every, gguf_layer_types, layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class Cohere(Family):
    name = "cohere"
    gguf_name = "command-r"
    class_names: tuple[str, ...] = ("CohereForCausalLM",)
    gguf_options = frozenset(("logit_scale",))
    harmless_options = frozenset(
        (
            *("model_max_length", "use_parallel_block", "use_gated_activation", "use_embedding_sharing"),
            *("use_parallel_embedding", "layer_switch"),  # the latter: `sliding_window_pattern` of Command R7B, said twice
        )
    )
    norm_kind = "layer without bias"
    norm_epsilon_name = "layer_norm_eps"
    norm_names = NormNames(inner="")
    rms_norm_eps = 1e-5
    has_parallel_mlp = True
    head_norm_option = "use_qk_norm"
    has_centered_head_norm = True
    is_rotary_interleaved = True
    rope_theta = 500_000.0
    ties_word_embeddings = True

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {"logit_scale": options.number("logit_scale", None)}

    def multipliers(self, options: JsonOptions) -> Multipliers:
        return Multipliers(logits=options.number("logit_scale", 0.0625))


class Cohere2(Cohere):
    name = "cohere2"
    head_norm_option = ""
    gguf_name = ""
    class_names = ("Cohere2ForCausalLM",)
    gguf_options = frozenset(("logit_scale", "attention.sliding_window"))
    harmless_options = Cohere.harmless_options | {"rotary_pct", "position_embedding_type", "order_of_interleaved_layers"}
    rope_theta = 10_000.0

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return super().of_gguf(options, num_layers) | {
            "sliding_window": options.count("attention.sliding_window"),
            "layer_types": gguf_layer_types(options, num_layers, 4),
        }

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        are_sliding = all_but_every(options.count("sliding_window_pattern", 4), num_layers)
        return layer_windows(options, window_size(options, 4096), are_sliding)

    def unrotated_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return tuple(index for index, window in enumerate(self.sliding_windows(options, num_layers)) if not window)
