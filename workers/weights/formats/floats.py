"""Floats on their way to the kernels: bfloat16 stays 16 bits wide, so that a large matrix is never expanded to float32 unless
the file or the kernels need that. Used by the loader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops import _cpu
from ops.cpu.packing import WEIGHT_KINDS
from ops.weight_format import BFLOAT16, WeightFormat, bfloat16_bits, float32

_EXPONENT = {
    np.dtype(np.float32): 0x7F800000,
    np.dtype(np.float16): 0x7C00,
    np.dtype(np.uint16): 0x7F80,
}  # bits of the exponent


def is_finite(values: np.ndarray) -> bool:
    """Return whether no value of float32, float16 or uint16 (the bits of bfloat16) is NaN or infinite. Reads at memory
    speed."""
    values = np.require(values, requirements=["C", "A"])
    return _cpu.are_finite(values.ctypes.data, values.size, values.itemsize, _EXPONENT[values.dtype])


def joined(parts: Sequence[np.ndarray], format: WeightFormat) -> np.ndarray:
    """Join the parts (float32, float16, or uint16: the bits of bfloat16), as bits if that loses nothing that `format` keeps,
    else as float32. A single part is not copied."""
    is_bits = all(part.dtype == np.uint16 for part in parts)
    is_rounded = format == BFLOAT16 and parts[0].ndim == 2 and any(part.dtype != np.float32 for part in parts)
    if len(parts) == 1 and (is_bits or parts[0].dtype == np.float32):
        return parts[0]
    result = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.uint16 if is_bits or is_rounded else np.float32)
    begin = 0
    for part in parts:
        rows = result[begin : begin + len(part)]
        begin += len(part)
        if is_bits and part.ndim == 2 and part.flags.aligned:
            strides = (stride // part.itemsize for stride in part.strides)
            _cpu.pack_rows(rows.ctypes.data, WEIGHT_KINDS.index("bfloat16"), part.ctypes.data, True, *strides, *part.shape)
        elif rows.dtype == np.uint16:
            bfloat16_bits(part, rows)
        else:
            rows[...] = float32(part)
    return result
