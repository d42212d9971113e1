"""Weights between a checkpoint and a backend: their stored formats, the backend's formats, and the store.

The loader hands a module's sources to `OpTable.pack`; the table asks the store for memory under a name and fills it. A source
is read only if its values are needed: a store that still has an array never calls `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

ALIGNMENT = 64
_NUMBERS_OF_BLOCK = 1 << 20  # rounded at a time


class WeightFormat(msgspec.Struct, frozen=True):
    """Storage of a matrix [out, in] by a backend. Integers q represent scale * q - offset, with one scale (and offset) for each
    output and group of `group_size` inputs; 0: one group. For int4, the scales of groups can be folded into the integers: scale
    * (multiplier * q), with one scale per output and an integer from -15 to 16 per group of 32, 64 or 128 inputs. float4 has
    codes of E2M1 in place of integers, q = DOUBLED_E2M1[code], and groups of 16 or 32. Scales of groups, and offsets, are in 16
    bits if all of them are numbers of that type: a packed layout may use it."""

    kind: Literal["float32", "bfloat16", "int8", "int4", "float4"]
    group_size: int = 0
    has_offsets: bool = False
    is_folded: bool = False
    scales: Literal["float32", "float16", "bfloat16"] = "float32"


DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the value of each code
LARGEST = {"int8": 128, "int4": 16, "float4": 12}  # at most the absolute value of an integer by kind
FLOAT32 = WeightFormat("float32")
BFLOAT16 = WeightFormat("bfloat16")


class QuantizedWeight(msgspec.Struct, frozen=True):
    """Matrix stored as integers in a checkpoint: q * scale - offset."""

    format: WeightFormat
    # [out, in] int8 for int8 (-128 to 127), uint8 for int4 (0 to 15; 8 represents 0 without offsets) and float4 (codes)
    values: np.ndarray
    scales: np.ndarray  # float32 [out, groups], with multipliers [out, 1]
    offsets: np.ndarray | None = None  # float32 [out, groups]
    multipliers: np.ndarray | None = None  # int8 [out, groups], not 0


Values = np.ndarray | QuantizedWeight  # an array is float32, or uint16: the bits of bfloat16
Source = Callable[[], Values]
Fill = Callable[[np.ndarray], None]
Parts = Sequence[tuple[int, int]]  # [begin, end) along the first axis of an array
Fills = Fill | Sequence[tuple[int, Fill]]  # several: each fills some rows of the first axis, in order


class SourceByRows:
    """Source that can be read row by row at proportional cost; `starts`: rows at which a tensor of the checkpoint begins."""

    def __init__(self, read: Callable[[int, int], Values], num_rows: int, starts: Sequence[int]) -> None:
        self.read = read  # outputs [begin, end)
        self.num_rows = num_rows
        self.starts = starts

    def __call__(self) -> Values:
        return self.read(0, self.num_rows)


class Store(Protocol):
    """Place where packed weights are kept."""

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        """Return the array `name`, contiguous and aligned to a cache line: created and filled now, or as filled before.
        `parts`: those that will be read; empty: all."""


class Memory:
    """Store without memory: every array is new."""

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        array = memory[start : start + num_bytes].view(dtype).reshape(shape)
        fill_parts(array, fill)
        return array


def fill_parts(array: np.ndarray, fills: Fills) -> None:
    begin = 0
    for num_rows, fill in fills if isinstance(fills, Sequence) else [(len(array), fills)]:
        fill(array[begin : begin + num_rows])
        begin += num_rows
    assert begin == len(array), f"{begin} of {len(array)} rows are filled"


def bfloat16_bits(values: np.ndarray, bits: np.ndarray) -> None:
    """Round `values` (float32, float16, or bits already) to nearest, ties to even, into `bits`, uint16 of the same shape."""
    step = max(1, _NUMBERS_OF_BLOCK // max(1, values[:1].size))
    for begin in range(0, len(values), step):
        block = values[begin : begin + step]
        if block.dtype != np.uint16:
            words = block.astype(np.float32).view(np.uint32)
            block = (words + (0x7FFF + (words >> 16 & 1)).astype(np.uint32)) >> 16
        bits[begin : begin + step] = block


def float32(values: Values) -> np.ndarray:
    """Return the values as float32; uint16 holds the bits of bfloat16."""
    if isinstance(values, np.ndarray):
        if values.dtype == np.uint16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32, copy=False)
    groups = np.arange(values.values.shape[1]) // (values.format.group_size or values.values.shape[1])
    zero = np.float32(8 if values.format.kind == "int4" and values.offsets is None else 0)
    integers = DOUBLED_E2M1[values.values] if values.format.kind == "float4" else values.values.astype(np.float32) - zero
    if values.multipliers is not None:
        return np.asarray(integers * values.multipliers[:, groups] * values.scales)
    result: np.ndarray = integers * values.scales[:, groups]
    return result if values.offsets is None else result - values.offsets[:, groups]
