"""Gemma 2 (Google 2024): Gemma 3 with soft caps on scores and logits, without head norms, and with one rotation."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.gemma3 import Gemma3
from engine.checkpoint.families.windows import layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class Gemma2(Gemma3):
    name = "gemma2"
    gguf_name = "gemma2"
    gguf_options = frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"))
    class_names = ("Gemma2ForCausalLM",)
    layers_of_27b = 46
    has_head_norm = False
    local_rope_theta = 0.0
    rope_theta = 10_000.0
    caps_scores = True
    default_softcap_of_logits = 30.0

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return self.scaling_of_gguf(options, num_layers) | {
            "sliding_window": options.count("attention.sliding_window", 4096),
            "attn_logit_softcapping": options.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": options.number("final_logit_softcapping", 30.0),
        }

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return layer_windows(options, window_size(options, 4096), [index % 2 == 0 for index in range(num_layers)])
