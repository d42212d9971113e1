"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random numbers as a function of key and
counter.

Used by the sampler. The number for a token is a function of the request's seed, the token's position and the sample's index
alone; so it is the same in any batch, after any crash, and needs no state.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, sample_index: int) -> np.float64:
    """A number in [0, 1) with 53 random bits. `seed` is a u64."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((position & _MASK, sample_index & _MASK, 0, 0), key)
    return np.float64(((high << 32) | low) >> 11) * np.float64(2.0**-53)
