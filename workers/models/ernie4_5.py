"""ERNIE 4.5, dense (Baidu 2025): llama whose rotary pairs are neighbours, (0, 1), (2, 3), ..., and whose projections all have
a bias or none (`use_bias`). Both are in `ModelConfig` (`rope.is_interleaved`, `has_*_bias`)."""

from __future__ import annotations

from workers.models.llama import Llama


class Ernie4_5(Llama):
    """The whole model."""
