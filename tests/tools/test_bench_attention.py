"""`python -m tools.bench.attention`: its counts, and the rates that it compares attention with."""

from __future__ import annotations

import pytest

from ops import _cpu
from ops.cpu.choice import KV_TYPES
from tools.bench.attention import DOT, FMA, operations, rates, unit_of


def test_operations_are_two_products_for_each_key_seen() -> None:
    assert operations(0, 3, (2, 1, 8)) == 2 * 2 * 2 * 8 * (1 + 2 + 3)
    assert operations(5, 1, (1, 1, 16)) == 2 * 2 * 16 * 6


def test_unit_is_the_multiplier_of_the_variant() -> None:
    for variant in _cpu.candidates():
        assert unit_of(variant, "float32") == FMA
        assert unit_of(variant, "bfloat16") == (DOT if DOT in _cpu.units(variant) else FMA)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_rate_is_reported_with_its_units_rate(dtype: str) -> None:
    before = _cpu.variant()
    found = [rates(variant, dtype, (5, 20), (4, 2, 16), 1) for variant in _cpu.candidates()]
    _cpu.select(before)
    assert all(attention > 0 and unit > 0 for attention, unit in found)
