"""8-bit floats (Micikevicius et al. 2022). e4m3fn: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, and NaN
if all other bits are set. e5m2: the upper byte of a half. Pure numpy."""

from __future__ import annotations

import numpy as np


def _table() -> np.ndarray:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    values = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), np.ldexp(1 + mantissas / 8, exponents - 7))
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3 = _table()


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the float32 values of the codes (uint8)."""
    values: np.ndarray = _E4M3[codes]
    return values


def e5m2(codes: np.ndarray) -> np.ndarray:
    """Return the float32 values of the codes (uint8)."""
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
