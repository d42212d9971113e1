"""GGML's blocks of values as integers with scales, for the same numbers as in `blocks.py`. Pure numpy.

Used by `gguf.py`. Types of 5 and 6 bits become int8, because the kernels have nothing in between. A decoder takes blocks, uint8
[n, bytes of a block], and returns values [n, values of a block], scales [n, groups of a block] and offsets of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ops.weight_format import WeightFormat
from workers.weights.formats.blocks import fifth_bits, half, halves, k_factors, k_values, q6_values
from workers.weights.formats.mxfp4 import MXFP4, scales_of

_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:].view(np.int8), half(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> _Parts:
    return halves(blocks[:, 2:]), half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return halves(blocks[:, 4:]), half(blocks, 0), -half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    return (halves(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16), half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    return (halves(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])).view(np.int8), half(blocks, 0), -half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> _Parts:
    return k_values(blocks, 4).reshape(len(blocks), -1), *k_factors(blocks)


def _q5_k(blocks: np.ndarray) -> _Parts:
    return k_values(blocks, 5).reshape(len(blocks), -1).view(np.int8), *k_factors(blocks)


def _q6_k(blocks: np.ndarray) -> _Parts:
    factors = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (q6_values(blocks).view(np.int8) - np.int8(32)).reshape(len(blocks), -1), factors, None


def _mxfp4(blocks: np.ndarray) -> _Parts:
    return halves(blocks[:, 1:]), scales_of(blocks[:, :1]), None


INTEGERS: dict[str, tuple[WeightFormat, Callable[[np.ndarray], _Parts]]] = {
    "Q8_0": (WeightFormat("int8", 32), _q8_0),
    "Q4_0": (WeightFormat("int4", 32), _q4_0),
    "Q4_1": (WeightFormat("int4", 32, True), _q4_1),
    "Q5_0": (WeightFormat("int8", 32), _q5_0),
    "Q5_1": (WeightFormat("int8", 32, True), _q5_1),
    "Q4_K": (WeightFormat("int4", 32, True), _q4_k),
    "Q5_K": (WeightFormat("int8", 32, True), _q5_k),
    "Q6_K": (WeightFormat("int8", 16), _q6_k),
    "MXFP4": (MXFP4, _mxfp4),
}
