"""Agreement of ranks on the placement of experts: after a death all have the same one, the old or the new."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from engine.parallel.placement import linear, owners, round_robin
from shm._native import store_u64
from shm.experts import MAX_VERSION, WINDOW_SINCE, ExpertTable, InForce, SharedExperts
from workers.rank_group.balance_board import BalanceBoard, next_version

NUM_EXPERTS = 8
LAYERS = (1, 3, 4)
FIRST = linear(NUM_EXPERTS, 2, NUM_EXPERTS + 3)
Boards = tuple[BalanceBoard, BalanceBoard]


@pytest.fixture
def table() -> Iterator[ExpertTable]:
    """The table as a reader sees it."""
    run_id, first = secrets.token_hex(4), owners(FIRST, NUM_EXPERTS).tobytes()
    made = ExpertTable.create(run_id, SharedExperts(LAYERS, NUM_EXPERTS, 2, first))
    yield ExpertTable.attach(run_id, is_readonly=True)
    made.segment.unlink()


@pytest.fixture
def boards(table: ExpertTable) -> Boards:
    """Boards of two ranks."""
    run_id = table.segment.run_id
    return BalanceBoard(ExpertTable.attach(run_id), 0), BalanceBoard(ExpertTable.attach(run_id), 1)


def tables_of(version: int, placement: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[int, bytes]:
    return version, b"".join(owners(layer, NUM_EXPERTS).tobytes() for layer in placement)


def test_proposed_placement_takes_effect(boards: Boards, table: ExpertTable) -> None:
    """A reader sees the placement in force, and at first the initial one."""
    leader, other = boards
    placement = (round_robin(NUM_EXPERTS, 2, NUM_EXPERTS + 3),) * len(LAYERS)
    assert (table.layers, table.num_experts, table.num_ranks) == (LAYERS, NUM_EXPERTS, 2)
    assert leader.placement(0) == (FIRST,) * len(LAYERS)
    before = leader.seal(7)
    leader.propose(7, 1, placement)
    assert (other.proposed(7), other.proposed(8)) == (1, None)
    assert other.placement(1) == placement
    assert table.committed() == tables_of(0, (FIRST,) * len(LAYERS))
    other.say_ready(7, 1)
    assert [leader.is_ready(rank, 7, 1) for rank in (0, 1)] == [False, True]
    assert leader.replace(before, InForce.of(7, 12, 1))
    found = other.in_force
    assert (found.epoch, found.number, found.version) == (7, 12, 1)
    leader.propose(7, 2, (linear(NUM_EXPERTS, 2, NUM_EXPERTS),) * len(LAYERS))
    assert other.placement(1) == placement  # until the next but one
    assert table.committed() == tables_of(1, placement)


def test_sealed_placement_is_not_replaced(boards: Boards) -> None:
    """The leader of a past epoch comes too late; or in time, and then all that join the next find its version."""
    leader, other = boards
    seen = leader.seal(3)
    assert other.seal(4).version == 0
    assert not leader.replace(seen, InForce.of(3, 9, 1))
    assert leader.seal(4).word == other.in_force.word
    assert leader.replace(leader.in_force, InForce.of(4, 9, 1))
    assert (other.seal(5).version, leader.seal(5).version, other.in_force.number) == (1, 1, 0)


def test_ranks_count_separately(boards: Boards, table: ExpertTable) -> None:
    first, second = boards
    first.counts[0, 2, 1] += np.uint64(5)
    second.counts[1, 2, 1] += np.uint64(2)
    assert second.counts.sum(axis=0)[2, 1] == 7
    assert np.flatnonzero(np.frombuffer(table.counts, np.uint64)).tolist() == [2 * NUM_EXPERTS + 1, 5 * NUM_EXPERTS + 1]


def test_window_being_written_is_not_read(boards: Boards, table: ExpertTable) -> None:
    """Nor is one with a writer that died in it, until the next one writes it."""
    counts = np.arange(len(LAYERS) * NUM_EXPERTS, dtype=np.uint64)
    assert table.recent_since() is None
    boards[0].show_window(2.5, counts)
    assert table.recent_since() == (2_500_000_000, counts.tobytes())
    store_u64(ExpertTable.attach(table.segment.run_id).words, WINDOW_SINCE, 0)
    assert table.recent_since() is None
    boards[1].show_window(3.5, counts)
    assert table.recent_since() == (3_500_000_000, counts.tobytes())


def test_versions_alternate_and_wrap() -> None:
    version, seen = 0, []
    for _ in range(2 * MAX_VERSION):
        following = next_version(version)
        assert following % 2 != version % 2
        assert 0 < following <= MAX_VERSION
        seen.append(version := following)
    assert len(set(seen)) == MAX_VERSION
