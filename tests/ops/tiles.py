"""Tile instructions in numpy, by Intel's manual (volume 2, "TDPBF16PS" and "TDPBSSD")."""

from __future__ import annotations

import numpy as np

STEP_INPUTS = 32  # that a tile of bfloat16 has of a row
LEAST_NORMAL = 2.0**-126


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16, the even one of two at equal distance; denormal numbers are 0."""
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(bits & 0x7F800000 == 0, np.uint16(0), nearest)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def flushed(values: np.ndarray) -> np.ndarray:
    """Replace denormal numbers by 0 of their sign."""
    return np.where(np.abs(values) < LEAST_NORMAL, np.copysign(0, values), values).astype(np.float32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c, rounded once to float32: the product of two bfloat16 is exact in float64; where its sum with c is not, it
    is made odd in its last place, so that the second rounding goes the way of the exact sum."""
    product, addend = a.astype(np.float64) * b, np.broadcast_arrays(c.astype(np.float64), a * b)[0]
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    is_moved = (error != 0) & (bits & 1 == 0) & np.isfinite(error)
    return np.where(is_moved, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def dot_bfloat16(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return c [rows, columns] plus the products of a [rows, steps, 2] and b [steps, columns, 2], float32 with bfloat16
    values."""
    a, b = flushed(a), flushed(b)
    chains = np.zeros((*c.shape, 2), np.float32)
    for step in range(len(b)):
        chains = flushed(fused(a[:, step, None], b[None, step], chains))
    products = flushed((chains[..., 0].astype(np.float64) + chains[..., 1]).astype(np.float32))
    return flushed((flushed(c).astype(np.float64) + products).astype(np.float32))


def dot_int8(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return c int32 [rows, columns] plus the products of a int8 [rows, steps, 4] and b int8 [steps, columns, 4]."""
    products = np.einsum("rsk,sck->rc", a.astype(np.int64), b.astype(np.int64))
    return (c + products).astype(np.int32)


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Compute a linear with bfloat16 weights [out, in] and float32 rows [rows, out]: in steps of 32 inputs, the last one padded
    with zeros."""
    rows, inputs = x.shape
    padded = -(-inputs // STEP_INPUTS) * STEP_INPUTS
    a, b = np.zeros((rows, padded), np.float32), np.zeros((padded, len(weight)), np.float32)
    a[:, :inputs], b[:inputs] = widened(bfloat16_bits(x)), weight.T
    y = np.zeros((rows, len(weight)), np.float32)
    for begin in range(0, padded, STEP_INPUTS):
        step = slice(begin, begin + STEP_INPUTS)
        pairs = b[step].reshape(STEP_INPUTS // 2, 2, -1).transpose(0, 2, 1)
        y = dot_bfloat16(y, a[:, step].reshape(rows, -1, 2), pairs)
    return y if bias is None else y + bias
