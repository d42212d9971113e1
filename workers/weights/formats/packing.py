"""Small unsigned integers packed into 32-bit words, lowest bits first. Pure numpy; used by AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import numpy as np


def unpacked(words: np.ndarray, num_bits: int) -> np.ndarray:
    """Return uint8 [..., n * 32 / num_bits] of int32 words [..., n]; `num_bits` is 4 or 8."""
    values = np.ascontiguousarray(words).view(np.uint8)
    if num_bits == 8:
        return values
    assert num_bits == 4, f"{num_bits} bits are not supported"
    halves = np.empty((*values.shape, 2), np.uint8)
    np.bitwise_and(values, 15, out=halves[..., 0])
    np.right_shift(values, 4, out=halves[..., 1])
    return halves.reshape(*values.shape[:-1], -1)
