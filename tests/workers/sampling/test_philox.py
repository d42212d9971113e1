"""Philox4x32-10 compared with the known answers of its authors' library (Random123, kat_vectors)."""

from __future__ import annotations

import numpy as np
import pytest

from ops._cpu import philox4x32, uniform

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_values(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_uniform_depends_on_seed_position_and_sample() -> None:
    seen = {
        uniform(seed, position, sample) for seed in (0, 1, 2**32, 2**64 - 1) for position in (0, 1, 5000) for sample in (0, 1)
    }
    assert len(seen) == 24
    assert all(0 <= value < 1 for value in seen)


def test_uniform_is_uniform() -> None:
    values = np.array([uniform(7, position, 0) for position in range(20_000)])
    assert abs(values.mean() - 0.5) < 0.01
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi square, 19 degrees of freedom
