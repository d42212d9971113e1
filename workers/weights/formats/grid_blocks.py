"""GGML's superblocks of 256 values with codes for vectors of a grid, IQ1_S to IQ3_S, as integers with scales. Pure numpy.

Used by `block_types.py`; see `blocks.py` for what a decoder does. A code stands for 8 values (4 in the IQ3 types), which get
signs (the IQ2 and IQ3 types) or are shifted by an eighth up or down (the IQ1 types).
"""

from __future__ import annotations

import numpy as np

from workers.weights.formats.blocks import Parts, half
from workers.weights.formats.grids import grid

_BITS = np.arange(8, dtype=np.uint8)


def iq2_xxs(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 2:], np.uint32).reshape(-1, 8, 2)
    codes = _view(words[..., 0], np.uint8)
    values = grid("IQ2_XXS")[codes].reshape(len(blocks), 256)
    return values * _signs_of(words[..., 1]), _odd(half(blocks, 0), words[..., 1] >> 28) / 8, None


def iq2_xs(blocks: np.ndarray) -> Parts:
    codes = _view(blocks[:, 2:66], np.uint16)
    values = grid("IQ2_XS")[codes & 511].reshape(len(blocks), 256)
    return values * _signs(_with_parity(codes >> 9)), _odd(half(blocks, 0), _pairs(blocks[:, 66:74])) / 8, None


def iq2_s(blocks: np.ndarray) -> Parts:
    high = (blocks[:, 66:74, None] >> _BITS[::2] & 3).reshape(-1, 32)
    values = grid("IQ2_S")[blocks[:, 2:34] | high.astype(np.uint16) << 8].reshape(len(blocks), 256)
    return values * _signs(blocks[:, 34:66]), _odd(half(blocks, 0), _pairs(blocks[:, 74:82])) / 8, None


def iq3_xxs(blocks: np.ndarray) -> Parts:
    values = grid("IQ3_XXS")[blocks[:, 2:66]].reshape(len(blocks), 256)
    words = _view(blocks[:, 66:98], np.uint32)
    return values * _signs_of(words), _odd(half(blocks, 0), words >> 28) / 4, None


def iq3_s(blocks: np.ndarray) -> Parts:
    """Odd numbers from -15 to 15, kept as 0 to 15 with an offset."""
    high = np.unpackbits(blocks[:, 66:74], axis=-1, bitorder="little")
    values = grid("IQ3_S")[blocks[:, 2:66] | high.astype(np.uint16) << 8].reshape(len(blocks), 256)
    signed = values * _signs(blocks[:, 74:106])
    factors = _odd(half(blocks, 0), _pairs(blocks[:, 106:110]))
    return (signed + np.int8(15) >> 1).view(np.uint8), 2 * factors, 15 * factors


def iq1_s(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 34:50], np.uint16)
    high = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    values = grid("IQ1_S")[blocks[:, 2:34] | high << 8].reshape(len(blocks), 256)
    factors = _odd(half(blocks, 0), words >> 12 & 7)
    shifts = np.where(words & 0x8000, np.float32(-0.125), np.float32(0.125))
    return (values + np.int8(1)).view(np.uint8), factors, (1 - shifts) * factors


def iq1_m(blocks: np.ndarray) -> Parts:
    """In eighths, because shifts belong to 8 values and scales to 16. d is in the highest bits of four words."""
    words = _view(blocks[:, 48:56], np.uint16)
    bits = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(bits, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    high = _pairs(blocks[:, 32:48])
    values = grid("IQ1_S")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8]
    shifts = np.where(high & 8, np.int8(-1), np.int8(1))[..., None]
    return (8 * values + shifts).reshape(len(blocks), 256), _odd(d, scales) / 8, None


def _view(values: np.ndarray, dtype: type[np.unsignedinteger]) -> np.ndarray:
    return np.ascontiguousarray(values).view(dtype)


def _odd(d: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return d * (2 * scale + 1) as float32."""
    factors: np.ndarray = d * (2 * scales.astype(np.float32) + 1)
    return factors


def _pairs(packed: np.ndarray) -> np.ndarray:
    """Return the low and the high half of each byte, side by side."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _signs_of(words: np.ndarray) -> np.ndarray:
    """Return signs of 32 values for each word, 7 bits for 8 values."""
    return _signs(_with_parity(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127))


def _with_parity(codes: np.ndarray) -> np.ndarray:
    """Return 8 signs of which an even number is set, from the first 7."""
    signs = codes.astype(np.uint8)
    folded = signs ^ signs >> 4
    folded ^= folded >> 2
    result: np.ndarray = signs | ((folded ^ folded >> 1) & 1) << 7
    return result


def _signs(packed: np.ndarray) -> np.ndarray:
    """Return int8 [n, 256]: -1 for each bit that is set, from the lowest of each byte, else 1."""
    bits: np.ndarray = packed[..., None] >> _BITS & 1
    signs: np.ndarray = np.int8(1) - 2 * bits.view(np.int8)
    return signs.reshape(len(packed), 256)
