"""Qwen2 (Yang et al. 2024): llama with biases on queries, keys and values, and sliding windows in the upper layers where the
config asks for them. Both are in `ModelConfig` (`has_qkv_bias`, `sliding_windows`)."""

from __future__ import annotations

from workers.models.llama import Llama


class Qwen2(Llama):
    """The whole model."""
