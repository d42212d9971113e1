"""The clock of a rank group: each step is begun once and run once by every member, and an epoch's steps are its own."""

from __future__ import annotations

from shm.rank_group import RankGroupHeader, buffers_at
from workers.rank_group.clock import RankGroupClock
from workers.rank_group.communicator import Communicator


def clocks(num_ranks: int) -> tuple[RankGroupHeader, list[Communicator], list[RankGroupClock]]:
    memory = memoryview(bytearray(buffers_at(num_ranks)))
    header = RankGroupHeader.begin(memory, num_ranks)
    ranks = [Communicator(memory, rank, 0, num_ranks, timeout_s=1.0, shares_experts=True) for rank in range(num_ranks)]
    return header, ranks, [RankGroupClock(rank) for rank in ranks]


def join(ranks: list[Communicator], own: list[RankGroupClock]) -> None:
    for rank, clock in zip(ranks, own, strict=True):
        clock.join(rank.join())


def test_two_ranks_start_the_same_step_once() -> None:
    header, ranks, own = clocks(2)
    for rank in range(2):
        header.set_member(rank, True)
    join(ranks, own)
    assert not own[0].is_ahead
    assert [clock.begin() for clock in own] == [True, False]
    assert [clock.is_ahead for clock in own] == [True, True]
    own[1].end_step()
    assert own[1].begin()  # it may go on; the other has two to run
    for _ in range(2):
        assert own[0].is_ahead
        own[0].end_step()
    assert (own[0].is_ahead, own[1].is_ahead) == (False, True)


def test_new_epoch_resets_the_clock() -> None:
    """Steps of the epoch before are forgotten; a second hello in one epoch forgets nothing."""
    header, ranks, own = clocks(2)
    for rank in range(2):
        header.set_member(rank, True)
    join(ranks, own)
    assert own[0].begin()
    own[0].end_step()
    join(ranks, own)
    assert (own[0].is_ahead, own[1].is_ahead) == (False, True)
    header.set_member(1, False)
    assert not own[1].begin()  # it does not know yet; another epoch's word is not its to move
    join(ranks, own)
    assert [clock.is_ahead for clock in own] == [False, False]
    assert [clock.begin() for clock in own] == [True, False]
    assert [clock.is_ahead for clock in own] == [True, False]  # a rank that is not a member runs nothing
