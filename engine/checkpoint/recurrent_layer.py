"""Sizes of a recurrent layer. Part of `ModelConfig`; `state_spec.py` lays the states of all layers out."""

from __future__ import annotations

import msgspec


class RecurrentLayer(msgspec.Struct, frozen=True):
    """Sizes of a recurrent layer's state."""

    channels: int  # of the convolution
    kernel: int  # positions that the convolution reads, its own included
    matrix: tuple[int, int, int] | None = None  # heads, key_dim, value_dim; None: a convolution alone
    log_width: int = 0  # numbers that the recurrence takes for a row
