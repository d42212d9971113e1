"""Experts of a layer as one tensor of 8-bit floats with scales, as transformers and Qwen store them.

    gate_up_proj, down_proj      float8 e4m3 [experts, rows, columns], outputs or inputs first
    ..._scale_inv, ..._scale or  floats [experts, rectangles of rows, rectangles of columns], or one for each expert, or for all
    ..._weight_scale

Called by the loader; `workers/weights/stacked.py` finds the matrices in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from engine.checkpoint.quantization_config import WeightScheme
from engine.errors import CheckpointError
from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.float8 import e4m3
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import SCALES, StoredTensor

_SCALES = ("_scale_inv", "_weight_scale", "_scale")


class StackedFloats(msgspec.Struct, frozen=True):
    """Codes of all experts; `places` has the rectangle of each row, and of each column."""

    codes: StoredTensor
    scales: StoredTensor
    places: tuple[np.ndarray, np.ndarray]
    is_float: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self) -> np.ndarray:
        return np.stack([self.rows(expert, 0, self.shape[1]).read() for expert in range(self.shape[0])])

    read_plain = read

    def kept(self) -> Kept:
        return "8-bit floats"

    def read_integers(self, format: WeightFormat) -> QuantizedWeight:
        raise AssertionError("8-bit floats are not integers")

    def rows(self, expert: int, begin: int, end: int) -> DecodedTensor:
        """Return rows [begin, end) of the matrix of one expert."""
        of_rows, of_columns = self.places

        def read() -> np.ndarray:
            values = e4m3(self.codes.read_stored()[expert, begin:end])
            values *= self._scales_of(expert)[of_rows[begin:end]][:, of_columns]
            return values

        return DecodedTensor((end - begin, self.shape[2]), read, read, self.kept, self.read_integers)

    def _scales_of(self, expert: int) -> np.ndarray:
        """Return the scales of the rectangles of one expert, [rows, columns]."""
        grid = tuple(int(places.max()) + 1 for places in self.places)
        own = math.prod(grid)
        size = self.scales.num_bytes // math.prod(self.scales.shape) * own
        is_for_all = math.prod(self.scales.shape) == own
        begin = self.scales.begin + (0 if is_for_all else expert * size)
        return msgspec.structs.replace(self.scales, shape=grid, begin=begin, end=begin + size).read()


def scales_name(name: str, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the name of the scales of the codes `name`; empty: they have none."""
    return next((name + suffix for suffix in _SCALES if name + suffix in tensors), "")


def stacked_floats(codes: StoredTensor, scales: StoredTensor, scheme: WeightScheme) -> StackedFloats:
    """Return the experts. Raises CheckpointError if the scales do not fit."""
    count, *sizes = codes.shape
    grid = scales.shape if len(scales.shape) == 3 else (*scales.shape, 1, 1)
    if scales.dtype in SCALES and (len(scales.shape) in (0, 3) or scales.shape in ((1,), (count,))):
        if len(grid) == 2:
            grid = (1, *grid)
        of_rows, of_columns = (_places(size, parts, scheme) for size, parts in zip(sizes, grid[1:], strict=True))
        if grid[0] in (1, count) and of_rows is not None and of_columns is not None:
            return StackedFloats(codes, scales.as_scales, (of_rows, of_columns))
    raise CheckpointError(
        f"{scales.name} has shape {list(scales.shape)} and dtype {scales.dtype}, which does not fit experts of shape "
        f"{list(codes.shape)} with scales for blocks of {list(scheme.block)}"
    )


def _places(size: int, parts: int, scheme: WeightScheme) -> np.ndarray | None:
    """Return the rectangle of each of `size` rows or columns in `parts` rectangles; None if they do not fit. Two
    halves are gate and up."""
    for width in (size, 1, *filter(None, scheme.block), *((size // 2,) if size % 2 == 0 else ())):
        if -(-size // width) == parts:
            places: np.ndarray = np.arange(size) // width
            return places
    return None
