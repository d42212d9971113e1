"""GGML's superblocks of 256 values as integers with scales: the K types, IQ4_XS, and the ternary types. Pure numpy.

Used by `block_types.py`; see `blocks.py` for what a decoder does. The parts of a superblock, of 16 or 32 values, have scales of
4, 6 or 8 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.weights.formats.blocks import IQ4, Parts, half, halves

_ZERO = np.uint8(8)  # represents 0 in 4 bits without offsets
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def q2_k(blocks: np.ndarray) -> Parts:
    scales = blocks[:, :16]
    factors = half(blocks, 80) * (scales & 15).astype(np.float32)
    return _quarters(blocks[:, 16:80]), factors, half(blocks, 82) * (scales >> 4).astype(np.float32)


def q3_k(blocks: np.ndarray) -> Parts:
    """A value has 2 bits; without its bit among the first 32 bytes, 4 is subtracted. The 16 scales have 4 bits in 8 bytes, low
    halves first, and 2 bits in 4 bytes."""
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = (_quarters(blocks[:, 32:96]) | high.reshape(len(blocks), 256) << 2) + (_ZERO - np.uint8(4))
    scales = halves(blocks[:, 96:104]) | _shifted(blocks[:, 104:108]) << 4
    return values, half(blocks, 108) * (scales.astype(np.float32) - 32), None


def _quarters(packed: np.ndarray) -> np.ndarray:
    """Return [n, 256] from 64 bytes: each half of them has 4 times 32 values of 2 bits, from the lowest bits."""
    return _shifted(packed.reshape(-1, 32)).reshape(len(packed), 256)


def _shifted(packed: np.ndarray) -> np.ndarray:
    """Return the lowest 2 bits of all bytes, then the next ones, [n, 4 * bytes]."""
    parts: np.ndarray = packed[:, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return parts.reshape(len(packed), -1)


def q4_k(blocks: np.ndarray) -> Parts:
    return _k_values(blocks, 4), *_k_factors(blocks)


def q5_k(blocks: np.ndarray) -> Parts:
    return _k_values(blocks, 5).view(np.int8), *_k_factors(blocks)


def _k_values(blocks: np.ndarray, num_bits: int) -> np.ndarray:
    """Return [n, 256]. With 5 bits, bit i of byte j of the high bits belongs to value j of part i."""
    low = halves(blocks[:, 16 if num_bits == 4 else 48 :].reshape(-1, 4, 32)).reshape(-1, 256)
    if num_bits == 4:
        return low
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values: np.ndarray = low | high.reshape(-1, 256) << 4
    return values


def _k_factors(blocks: np.ndarray) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the factors of the 8 parts and their offsets, [n, 8] each: d * scale and m * minimum. The 8 scales and 8 minima of
    6 bits are packed in 12 bytes: 4 bytes with scales 0 to 3, 4 with minima 0 to 3, 4 with the low halves of the others, which
    have their high bits in the upper two bits of the first 8 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return half(blocks, 0) * scales.astype(np.float32), half(blocks, 2) * minima.astype(np.float32)


def q6_k(blocks: np.ndarray) -> Parts:
    """A block has 128 bytes of low halves, 64 of the upper two bits, 16 scales, d. In each half of the block, bytes 0 to 63
    have values 0 to 63 low and 64 to 127 high; the upper bits of value 32 i + j are bits 2 i of byte j."""
    low = halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    values = low | _quarters(blocks[:, 128:192]) << 4
    factors = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return values.view(np.int8) - np.int8(32), factors, None


def iq4_xs(blocks: np.ndarray) -> Parts:
    """The 8 scales have 2 bits in bytes 2 and 3, and 4 bits in the next 4 bytes."""
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    values = IQ4[halves(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256)
    return values, half(blocks, 0) * scales, None


def tq1_0(blocks: np.ndarray) -> Parts:
    """A byte q holds 5 digits of base 3 (4 in the last bytes): the first is 3 q / 256, the next 3 (3 q mod 256) / 256."""
    parts = []
    for begin, end, num_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        shifted = blocks[:, None, begin:end] * _POWERS[:num_digits, None]
        parts.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1) + (_ZERO - np.uint8(1)), _both_halves(half(blocks, 52)), None


def tq2_0(blocks: np.ndarray) -> Parts:
    return _quarters(blocks[:, :64]) + (_ZERO - np.uint8(1)), _both_halves(half(blocks, 64)), None


def _both_halves(scales: np.ndarray) -> np.ndarray:
    """Return the scale of each block for the two groups of 128 that the kernels have."""
    return np.repeat(scales, 2, axis=1)
