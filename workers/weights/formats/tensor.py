"""Interface of a tensor for the loader, in any stored format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat

Kept = WeightFormat | str | None
"""Format that represents stored integers exactly, or why none does; None: stored as floats."""


class Tensor(Protocol):
    """`read` returns float32; `read_plain` float32, float16 or uint16 (the bits of bfloat16), a view of the file if it is
    stored so; `read_integers` the numbers in a format that represents the result of `kept`. Each call decodes again. `kept`
    reads at most zero points and group orders."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_float(self) -> bool: ...

    @property
    def read(self) -> Callable[[], np.ndarray]: ...

    @property
    def read_plain(self) -> Callable[[], np.ndarray]: ...

    @property
    def kept(self) -> Callable[[], Kept]: ...

    @property
    def read_integers(self) -> Callable[[WeightFormat], QuantizedWeight]: ...
