"""GGML's blocks of 32 values as integers with scales. Pure numpy.

Used by `block_types.py`. A decoder takes blocks, uint8 [n, bytes of a block], and returns values [n, values of a block], scales
[n, groups of a block], and offsets of the same shape or None. d (and m, a minimum) are float16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.weights.formats.mxfp4 import scales_of

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # of IQ4_NL and IQ4_XS


def half(blocks: np.ndarray, begin: int) -> NDArray[np.float32]:
    """Return the float16 at `begin` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def halves(packed: np.ndarray) -> np.ndarray:
    """Return low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), half(blocks, 0), None


def q4_0(blocks: np.ndarray) -> Parts:
    return halves(blocks[:, 2:]), half(blocks, 0), None


def q4_1(blocks: np.ndarray) -> Parts:
    return halves(blocks[:, 4:]), half(blocks, 0), -half(blocks, 2)


def q5_0(blocks: np.ndarray) -> Parts:
    return (halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16), half(blocks, 0), None


def q5_1(blocks: np.ndarray) -> Parts:
    return (halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).view(np.int8), half(blocks, 0), -half(blocks, 2)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Return 32 bits of each block, each as 16 or 0."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def mxfp4(blocks: np.ndarray) -> Parts:
    return halves(blocks[:, 1:]), scales_of(blocks[:, :1]), None


def iq4_nl(blocks: np.ndarray) -> Parts:
    return IQ4[halves(blocks[:, 2:])], half(blocks, 0), None
