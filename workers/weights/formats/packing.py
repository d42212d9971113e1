"""Small unsigned integers packed into 32-bit words, lowest bits first; some of 3 bits continue in the next word. Pure numpy;
used by AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import numpy as np


def unpacked(words: np.ndarray, num_bits: int) -> np.ndarray:
    """Return uint8 [..., n * 32 / num_bits] of int32 words [..., n]; `num_bits` is 2, 3, 4 or 8."""
    values = np.ascontiguousarray(words).view(np.uint8)
    if num_bits == 8:
        return values
    if num_bits != 4:
        bits = np.unpackbits(values, axis=-1, bitorder="little").reshape(*values.shape[:-1], -1, num_bits)
        places = np.arange(num_bits, dtype=np.uint8)
        numbers: np.ndarray = np.bitwise_or.reduce(bits << places, axis=-1)
        return numbers
    halves = np.empty((*values.shape, 2), np.uint8)
    np.bitwise_and(values, 15, out=halves[..., 0])
    np.right_shift(values, 4, out=halves[..., 1])
    return halves.reshape(*values.shape[:-1], -1)
