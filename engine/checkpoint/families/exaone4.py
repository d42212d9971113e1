"""EXAONE 4 (LG AI Research 2025): Qwen3's head norms; norms behind attention and MLP alone; where windows slide in some layers,
only these are rotated."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.family import Biases, Family, NormNames
from engine.checkpoint.families.windows import all_but_every, layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class Exaone4(Family):
    name = "exaone4"
    class_names = ("Exaone4ForCausalLM",)
    num_kv_heads = 32
    gguf_options = frozenset(("attention.sliding_window",))
    rms_norm_eps = 1e-5
    has_head_norm = True
    norm_names = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(False, False, False)

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        window = options.count("attention.sliding_window", 0, least=0) or None
        pattern = options.values.get("attention.sliding_window_pattern")
        if window is None or not isinstance(pattern, list) or len(pattern) != num_layers:
            return {"sliding_window": window}
        return {
            "sliding_window": window,
            "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in pattern],
        }

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        window = window_size(options, 4096)
        pattern = options.values.get("sliding_window_pattern")
        if not window:
            are_sliding = [False] * num_layers  # the pattern is 0 then
        elif isinstance(pattern, str):  # "LLLG": three local layers, one global
            if not pattern or set(pattern) - {"L", "G"}:
                raise options.error("sliding_window_pattern", f"{pattern!r} should consist of L (local) and G (global)")
            are_sliding = [pattern[index % len(pattern)] == "L" for index in range(num_layers)]
        else:
            are_sliding = all_but_every(options.count("sliding_window_pattern", 4), num_layers)
        return layer_windows(options, window, are_sliding)

    def unrotated_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        if not window_size(options, 4096):
            return ()
        return tuple(index for index, window in enumerate(self.sliding_windows(options, num_layers)) if not window)
