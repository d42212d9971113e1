"""Qwen3 (Yang et al. 2025): llama with an RMSNorm on each query and key head before it is rotated, and Qwen2's windows."""

from __future__ import annotations

from engine.checkpoint.families.drafts import QWEN3, DraftNames
from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.json_fields import JsonOptions


class Qwen3(Qwen2):
    name = "qwen3"
    class_names: tuple[str, ...] = ("Qwen3ForCausalLM",)
    gguf_names_with_pictures = ("qwen3vl",)
    has_head_norm = True
    draft_names: DraftNames | None = QWEN3
    head_dim = 128  # the default of Qwen3's own configuration class

    def biases(self, options: JsonOptions) -> Biases:
        return Family.biases(self, options)
