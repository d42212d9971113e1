"""Balanced chunks of prompts with media, compared with all possible cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.chunk_cuts import Span, balanced_cut, last_cut, merged, uncut


def cuts(end: int, max_tokens: int, *lists: list[Span]) -> list[int]:
    """Return the end of each chunk."""
    found = [0]
    while found[-1] < end:
        cut = balanced_cut(found[-1], end, max_tokens, *lists)
        assert cut > found[-1], "there is no way"
        found.append(cut)
    return found


def best(end: int, max_tokens: int, spans: list[Span]) -> tuple[int, int] | None:
    """Return the fewest chunks and, of those, the smallest largest one, by trying everything: a table over all legal
    positions."""
    legal = [p for p in range(end + 1) if not any(first < p < stop for first, stop in spans)]
    table: dict[int, dict[int, int]] = {0: {0: 0}}  # position -> number of chunks -> their smallest largest one
    for position in legal[1:]:
        ways: dict[int, int] = {}
        for before in legal:
            if before < position <= before + max_tokens:
                for count, largest in table.get(before, {}).items():
                    candidate = max(largest, position - before)
                    ways[count + 1] = min(candidate, ways.get(count + 1, candidate))
        table[position] = ways
    return min(table[end].items()) if table.get(end) else None


def test_prompts_without_a_cut() -> None:
    assert cuts(0, 8) == [0]
    assert cuts(8, 8) == [0, 8]


def test_text_is_cut_into_equal_parts() -> None:
    assert cuts(12, 8) == [0, 6, 12]


def test_consecutive_pictures_and_a_long_video() -> None:
    pictures = [(2, 8), (8, 14), (14, 20)]
    assert cuts(22, 14, pictures) == [0, 14, 22]
    video = [(first, first + 3) for first in range(0, 300, 3)]  # an odd number of frames has its last row too
    chunks = cuts(300, 16, video)
    assert {after - before for before, after in pairwise(chunks)} <= {15, 12}
    assert sum(after - before for before, after in pairwise(chunks)) == 300


def test_cuts_are_only_at_boundaries_of_rows() -> None:
    rows = [(4, 8), (8, 12)]
    assert [last_cut(0, end, rows) for end in range(1, 14)] == [1, 2, 3, 4, 4, 4, 4, 8, 8, 8, 8, 12, 13]
    assert last_cut(4, 7, rows) == 4


def test_overlapping_lists() -> None:
    assert last_cut(0, 9, [(6, 10)], [(3, 7)]) == 3
    assert merged([(6, 10), (3, 7), (10, 12)]) == [(3, 10), (10, 12)]


def test_unit_longer_than_a_chunk_is_cut() -> None:
    unit = [(2, 30)]
    assert uncut(0, unit, 16) == []
    assert uncut(20, unit, 16) == [(20, 30)]
    assert balanced_cut(20, 34, 12, uncut(20, unit, 12)) == 30


def test_no_way() -> None:
    assert balanced_cut(4, 20, 5, [(4, 10)]) == 4


@pytest.mark.parametrize("max_tokens", [1, 3, 7, 100])
def test_empty_input(max_tokens: int) -> None:
    assert balanced_cut(0, 0, max_tokens) == 0


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=6), st.integers(0, 6), st.integers(1, 12))
def test_cuts_are_optimal(parts: list[tuple[int, int]], num_last: int, max_tokens: int) -> None:
    """`parts`: text, then a unit."""
    spans: list[Span] = []
    end = 0
    for num_text, num_unit in parts:
        spans.append((end + num_text, end + num_text + num_unit))
        end += num_text + num_unit
    end += num_last
    expected = best(end, max_tokens, spans)
    if expected is None:
        assert balanced_cut(0, end, max_tokens, spans) == 0
        return
    found = cuts(end, max_tokens, spans)
    assert not any(first < cut < stop for cut in found for first, stop in spans)
    assert (len(found) - 1, max((after - before for before, after in pairwise(found)), default=0)) == expected
