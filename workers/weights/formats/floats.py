"""Floats on their way to the kernels: brain floats stay 16 bits wide, so that a large matrix is never held as float32 when
neither the file nor the kernels have it so. Used by the loader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.weight_format import BFLOAT16, WeightFormat, float32

_ROW_BLOCK = 1 << 20  # numbers that are rounded at a time
_INFINITY = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, np.dtype(np.uint16): 0x7F80}  # its bits


def is_finite(values: np.ndarray) -> bool:
    """Whether none of float32, float16 or uint16 (the bits of bfloat16) is NaN or infinite: of either sign, their bits are the
    largest. Reads at the speed of memory and makes no array."""
    infinity, bits = _INFINITY[values.dtype], values.dtype.itemsize * 8
    largest = values.view(f"i{bits // 8}").max(initial=0), values.view(f"u{bits // 8}").max(initial=0)
    return bool(largest[0] < infinity and largest[1] < infinity + (1 << bits - 1))


def joined(parts: Sequence[np.ndarray], format: WeightFormat) -> np.ndarray:
    """The parts (float32, float16, or uint16: the bits of bfloat16) one after another, as bits where that loses nothing that
    `format` keeps, else as float32. A part by itself is not copied."""
    is_bits = all(part.dtype == np.uint16 for part in parts)
    is_rounded = format == BFLOAT16 and parts[0].ndim == 2 and any(part.dtype != np.float32 for part in parts)
    if len(parts) == 1 and (is_bits or parts[0].dtype == np.float32):
        return parts[0]
    if is_bits:
        return np.concatenate(parts)
    result = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.uint16 if is_rounded else np.float32)
    begin = 0
    for part in parts:
        rows = result[begin : begin + len(part)]
        begin += len(part)
        if is_rounded:
            bfloat16_bits(part, rows)
        else:
            rows[...] = float32(part)
    return result


def bfloat16_bits(values: np.ndarray, bits: np.ndarray) -> None:
    """Round `values` (float32, float16, or bits already) to nearest, ties to even, into `bits`, uint16 of the same shape."""
    step = max(1, _ROW_BLOCK // max(1, values[:1].size))
    for begin in range(0, len(values), step):
        block = values[begin : begin + step]
        if block.dtype != np.uint16:
            words = block.astype(np.float32).view(np.uint32)
            block = (words + (0x7FFF + (words >> 16 & 1)).astype(np.uint32)) >> 16
        bits[begin : begin + step] = block
