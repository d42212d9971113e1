"""Shares of a bounded queue: a source that fills it leaves room for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.process.shares import has_room


@pytest.mark.parametrize("limit", [1, 3, 64, 1024])
def test_single_source_gets_the_limit_and_others_room(limit: int) -> None:
    num_hog = 0
    while has_room(num_hog, num_hog, limit):
        num_hog += 1
    assert num_hog == limit
    assert has_room(0, num_hog, limit)


@given(st.integers(1, 40), st.lists(st.integers(0, 5), max_size=200))
def test_refused_source_has_its_share(limit: int, new_requests: list[int]) -> None:
    """A refused source has at least as much as is left, for any order of arrivals."""
    waiting = [0] * 6
    for source in new_requests:
        if has_room(waiting[source], sum(waiting), limit):
            waiting[source] += 1
        else:
            assert waiting[source] >= 2 * limit - sum(waiting)
    assert sum(waiting) <= 2 * limit


def test_several_at_once_count_as_many() -> None:
    assert has_room(0, 0, 10, 20)  # where nothing waits, it goes on at once
    assert not has_room(1, 0, 10, 20)
    assert has_room(2, 8, 10, 10)
    assert not has_room(2, 9, 10, 10)
