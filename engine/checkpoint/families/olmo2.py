"""OLMo 2 and 3 (Allen Institute for AI 2024, 2025): norms behind attention and MLP alone, and of all queries and all keys of a
token; OLMo 3 has sliding windows, and scales the rotation of layers without one."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.family import Biases, Family, NormNames
from engine.checkpoint.families.windows import all_but_every, gguf_layer_types, layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class Olmo2(Family):
    name = "olmo2"
    class_names: tuple[str, ...] = ("Olmo2ForCausalLM",)
    rms_norm_eps = 1e-5
    has_wide_norm = True
    norm_names = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)


class Olmo3(Olmo2):
    name = "olmo3"
    class_names = ("Olmo3ForCausalLM",)
    gguf_name = "olmo2"  # with windows
    gguf_options = frozenset(("attention.sliding_window",))
    rope_theta = 500_000.0
    local_rope_theta = 500_000.0  # transformers reads `rope_theta` for layers without a window only

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        theta = options.number("rope.freq_base", 10_000.0)
        return {
            "sliding_window": options.count("attention.sliding_window"),
            "layer_types": gguf_layer_types(options, num_layers, 4),
            "rope_local_base_freq": options.number("rope.freq_base_swa", theta),
        }

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return layer_windows(options, window_size(options, 4096), all_but_every(4, num_layers))
