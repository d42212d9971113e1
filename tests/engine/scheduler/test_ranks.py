"""Present ranks, and ranks with wrong weights: cases of several ranks, which the simulation lacks."""

from __future__ import annotations

from msgspec.structs import replace

from engine.messages import Hello, WeightsState
from engine.process.run_directory import WeightsRecord
from engine.scheduler.ranks import Ranks

OLD, NEW = ("/old", 1), ("/new", 2)


def hello(rank: int, epoch: int, version: int = 1, path: str = "/old") -> Hello:
    return Hello(f"worker{rank}", epoch, version, path)


def both_there() -> Ranks:
    ranks = Ranks(2)
    assert ranks.said_hello(0, hello(0, 1))
    assert not ranks.are_complete
    assert ranks.said_hello(1, hello(1, 1))
    assert ranks.are_complete
    return ranks


def test_repeated_hello_is_no_restart() -> None:
    ranks = both_there()
    assert not ranks.said_hello(1, hello(1, 1))
    assert ranks.said_hello(1, hello(1, 2))
    assert not ranks.said_hello(1, hello(1, 1))


def test_restarted_rank_is_absent_until_its_hello() -> None:
    ranks = both_there()
    ranks.restarted(0, 2)
    assert not ranks.are_complete
    assert not ranks.said_hello(0, hello(0, 1))
    assert ranks.said_hello(0, hello(0, 2))
    ranks.restarted(0, 2)  # seen after its Hello
    assert ranks.are_complete


def in_rank_group(rank: int, epoch: int, rank_group_epoch: int) -> Hello:
    return Hello(f"worker{rank}", epoch, 1, "/old", "", rank_group_epoch)


def test_ranks_of_different_epochs_are_not_complete() -> None:
    """One dies and comes back; the other sends another hello, which is no restart."""
    ranks = Ranks(2)
    for rank in ranks.all:
        assert ranks.said_hello(rank, in_rank_group(rank, 1, 3))
        assert ranks.joined(rank, in_rank_group(rank, 1, 3))
    assert (ranks.are_complete, ranks.rank_group_epoch) == (True, 3)
    assert not ranks.said_hello(0, in_rank_group(0, 1, 4))  # before the table shows that its peer is gone
    assert ranks.joined(0, in_rank_group(0, 1, 4))
    assert not ranks.joined(0, in_rank_group(0, 1, 4))
    assert not ranks.are_complete
    ranks.restarted(1, 2)
    assert not ranks.joined(1, in_rank_group(1, 1, 4))  # of a life that is over
    for rank, epoch in ((0, 1), (1, 2)):
        assert not ranks.are_complete
        assert ranks.said_hello(rank, in_rank_group(rank, epoch, 5)) == (rank == 1)
        assert ranks.joined(rank, in_rank_group(rank, epoch, 5))
    assert (ranks.are_complete, ranks.rank_group_epoch) == (True, 5)


def record(*ranks: tuple[str, int], state: WeightsState = WeightsState.NORMAL) -> WeightsRecord:
    return WeightsRecord(*NEW, 2, state, ranks)


def test_ranks_may_have_different_weights() -> None:
    """A reload of one rank leaves the other with its weights."""
    ranks = both_there()
    ranks.changed(1, *NEW)
    assert (ranks.weights_of(0), ranks.weights_of(1)) == (OLD, NEW)
    assert not ranks.have_wrong_weights(record(OLD, NEW))
    assert ranks.have_wrong_weights(record(NEW, NEW))
    ranks.said_hello(1, hello(1, 2))  # it died, and came back with the old ones
    assert ranks.have_wrong_weights(record(OLD, NEW))


def test_first_rank_defines_the_contents() -> None:
    """A version has the same contents on all ranks."""
    ranks, start = Ranks(2), record(OLD, OLD)
    ranks.said_hello(0, Hello("worker0", 1, 1, "/old", "a"))
    ranks.said_hello(1, Hello("worker1", 1, 1, "/old", "a"))
    assert ranks.have_wrong_weights(start)
    known = ranks.with_contents(start)
    assert (known.contents, ranks.have_wrong_weights(known), ranks.overwritten(known)) == ({1: "a"}, False, "")
    ranks.said_hello(1, Hello("worker1", 2, 1, "/old", "b"))
    assert ranks.with_contents(known) == known
    assert (ranks.have_wrong_weights(known), ranks.overwritten(known)) == (True, "/old")


def test_contents_of_unreachable_versions_are_forgotten() -> None:
    ranks, contents = both_there(), {1: "a", 2: "b"}
    assert ranks.with_contents(replace(record(OLD, NEW), contents=contents)).contents == contents
    assert ranks.with_contents(replace(record(NEW, NEW), contents=contents)).contents == {2: "b"}


def test_cleared_ranks_hold_nothing() -> None:
    ranks, cleared = both_there(), record(OLD, OLD, state=WeightsState.CLEARED)
    assert ranks.have_wrong_weights(cleared)
    for rank in ranks.all:
        assert ranks.have_wrong_weights(cleared)
        ranks.changed(rank, "", 0)
    assert not ranks.have_wrong_weights(cleared)
