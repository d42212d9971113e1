"""Placements of experts: common properties, placements without missing ranks, and the choice of the computing rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.placement import (
    FIRST_PLACEMENTS,
    LayerPlacement,
    max_redundant_experts,
    owner,
    owners,
    without_missing,
)


def check_placement(placement: LayerPlacement, num_experts: int, num_ranks: int, num_slots: int) -> None:
    """Check that every expert is placed, on no rank twice, and that numbers per rank differ by at most one."""
    assert len(placement) == num_ranks
    assert {expert for experts in placement for expert in experts} == set(range(num_experts))
    assert all(len(set(experts)) == len(experts) for experts in placement)
    assert sorted(map(len, placement)) == sorted(
        num_slots * (r + 1) // num_ranks - num_slots * r // num_ranks for r in range(num_ranks)
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw experts, ranks, slots."""
    num_experts, num_ranks = draw(st.integers(1, 24)), draw(st.integers(1, 9))
    redundant = draw(st.integers(0, max_redundant_experts(num_experts, num_ranks)))
    return num_experts, num_ranks, num_experts + redundant


@pytest.mark.parametrize("strategy", FIRST_PLACEMENTS)
@given(shape=shapes())
def test_first_placements(strategy: str, shape: tuple[int, int, int]) -> None:
    num_experts, num_ranks, num_slots = shape
    check_placement(FIRST_PLACEMENTS[strategy](num_experts, num_ranks, num_slots), num_experts, num_ranks, num_slots)


def test_neighbours_lie_together_or_apart() -> None:
    assert FIRST_PLACEMENTS["linear"](6, 2, 6) == ((0, 1, 2), (3, 4, 5))
    assert FIRST_PLACEMENTS["round_robin"](6, 2, 6) == ((0, 2, 4), (1, 3, 5))
    assert FIRST_PLACEMENTS["linear"](4, 3, 5) == ((0,), (1, 2), (0, 3))
    assert FIRST_PLACEMENTS["round_robin"](4, 2, 6) == ((0, 1, 2), (0, 1, 3))


@given(shape=shapes(), data=st.data())
def test_present_ranks_replace_missing_ones(shape: tuple[int, int, int], data: st.DataObject) -> None:
    """Present ranks keep their experts, and each expert that was only on missing ranks is on one of them."""
    placement = FIRST_PLACEMENTS["linear"](*shape)
    members = data.draw(st.sets(st.integers(0, shape[1] - 1), min_size=1))
    left = without_missing(placement, members)
    kept = {expert for rank in members for expert in placement[rank]}
    assert {expert for experts in left for expert in experts} == set(range(shape[0]))
    added: Counter[int] = Counter()
    for rank, experts in enumerate(left):
        if rank not in members:
            assert experts == ()
            continue
        assert set(placement[rank]) <= set(experts)
        added.update(set(experts) - set(placement[rank]))
    assert added == Counter(set(range(shape[0])) - kept)
    assert without_missing(placement, range(shape[1])) == placement


def test_lost_experts_are_distributed() -> None:
    assert without_missing(((0, 1, 2), (3, 4, 5), (6, 7, 8)), {0, 2}) == ((0, 1, 2, 3, 5), (), (4, 6, 7, 8))


@given(shape=shapes())
def test_each_pair_is_computed_once(shape: tuple[int, int, int]) -> None:
    """A rank that has the expert computes it; all that have it take turns."""
    num_experts, num_ranks, _ = shape
    placement = FIRST_PLACEMENTS["round_robin"](*shape)
    table = owners(placement, num_experts)
    for expert in range(num_experts):
        having = [rank for rank in range(num_ranks) if expert in placement[rank]]
        for home in range(num_ranks):
            assert Counter(owner(table, expert, home, row) for row in range(3 * len(having))) == Counter(having * 3)
