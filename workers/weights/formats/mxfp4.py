"""MXFP4 (OCP Microscaling Formats 1.0): 32 values of 4 bits (E2M1) share a power of two (E8M0). Pure numpy; used for the
experts of gpt-oss and for GGUF files."""

from __future__ import annotations

import numpy as np

from ops.weight_format import WeightFormat

GROUP_SIZE = 32
NAN = 255  # among exponents
MXFP4 = WeightFormat("float4", GROUP_SIZE, scales="bfloat16")


def codes_of(packed: np.ndarray) -> np.ndarray:
    """Return uint8 [..., n, 2] from bytes [..., n]: the low half of a byte comes first."""
    return np.stack([packed & 15, packed >> 4], axis=-1)


def scales_of(exponents: np.ndarray) -> np.ndarray:
    """Return float32 scales of doubled values: 2^(exponent - 127) / 2."""
    scales: np.ndarray = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return scales
