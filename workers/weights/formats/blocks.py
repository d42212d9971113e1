"""GGML's blocks of values as float32, bit for bit like llama.cpp's reference code. Pure numpy.

Used by `gguf.py` and `block_integers.py`. A function takes blocks, uint8 [n, bytes of a block], and returns float32 [n, values
of a block]. d (and m, a minimum) are float16 scales. Q4_K, Q5_K and Q6_K are superblocks of 256 values; their parts have
separate scales, 6 or 8 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ops.weight_format import DOUBLED_E2M1
from workers.weights.formats.mxfp4 import scales_of


def dequantized_blocks(type_name: str, blocks: np.ndarray) -> np.ndarray:
    values: np.ndarray = _DECODERS[type_name](blocks)
    return values


def half(blocks: np.ndarray, begin: int) -> NDArray[np.float32]:
    """Return the float16 at `begin` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def halves(packed: np.ndarray) -> np.ndarray:
    """Return low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Return 32 bits of each block, each as 16 or 0."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _f16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _q8_0(blocks: np.ndarray) -> NDArray[np.float32]:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> NDArray[np.float32]:
    return (halves(blocks[:, 2:]).astype(np.float32) - 8) * half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> NDArray[np.float32]:
    return halves(blocks[:, 4:]).astype(np.float32) * half(blocks, 0) + half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> NDArray[np.float32]:
    values: NDArray[np.uint8] = halves(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return (values.astype(np.float32) - 16) * half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> NDArray[np.float32]:
    values: NDArray[np.uint8] = halves(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return values.astype(np.float32) * half(blocks, 0) + half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _with_minima(blocks, k_values(blocks, 4))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    return _with_minima(blocks, k_values(blocks, 5))


def k_values(blocks: np.ndarray, num_bits: int) -> np.ndarray:
    """Return [n, 8, 32]. With 5 bits, bit i of byte j of the high bits belongs to value j of part i."""
    low = halves(blocks[:, 16 if num_bits == 4 else 48 :].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    if num_bits == 4:
        return low
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values: np.ndarray = low | high << 4
    return values


def k_factors(blocks: np.ndarray) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the factors of the 8 parts and their offsets, [n, 8] each: d * scale and m * minimum. The 8 scales and 8 minima of
    6 bits are packed in 12 bytes: 4 bytes with scales 0 to 3, 4 with minima 0 to 3, 4 with the low halves of the others, which
    have their high bits in the upper two bits of the first 8 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return half(blocks, 0) * scales.astype(np.float32), half(blocks, 2) * minima.astype(np.float32)


def _with_minima(blocks: np.ndarray, values: np.ndarray) -> NDArray[np.float32]:
    factors, offsets = k_factors(blocks)
    return (factors[:, :, None] * values.astype(np.float32) - offsets[:, :, None]).reshape(len(blocks), 256)


def q6_values(blocks: np.ndarray) -> np.ndarray:
    """Return [n, 2, 128], 0 to 63. A block has 128 bytes of low halves, 64 of the upper two bits, 16 scales, d. In each half of
    the block, bytes 0 to 63 have values 0 to 63 low and 64 to 127 high; the upper bits of value 32 i + j are bits 2 i of byte
    j."""
    low = halves(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values: np.ndarray = low | high.reshape(-1, 2, 128) << 4
    return values


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    values = q6_values(blocks).astype(np.float32) - 32
    factors = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (factors[:, :, None] * values.reshape(-1, 16, 16)).reshape(len(blocks), 256)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    values: np.ndarray = DOUBLED_E2M1[halves(blocks[:, 1:])] * scales_of(blocks[:, :1])
    return values


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
