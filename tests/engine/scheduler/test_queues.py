"""Order: priority, then arrival, then intake; new requests are skipped while the intake is held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.queues import SequenceQueue, WaitingQueue, place_in_line
from engine.scheduler.sequence import Sequence
from tests.engine.scheduler.sequences import make_sample

RANKS = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=20)


def names(queue: SequenceQueue) -> list[str]:
    return [sequence.request.own.request_id for sequence in queue]


def samples_of(ranks: list[tuple[int, int]]) -> list[Sequence]:
    return [
        make_sample(f"s{order}", [1], priority=priority, arrival_ns=arrival_ns, order=order)
        for order, (priority, arrival_ns) in enumerate(ranks)
    ]


@given(RANKS)
def test_order_holds_after_removals(ranks: list[tuple[int, int]]) -> None:
    sequences = samples_of(ranks)
    queue = SequenceQueue()
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[::3]:
        queue.remove(sequence)
    for sequence in sequences[::6]:
        queue.push(sequence)  # as a preempted one: to its old place
    left = [sequence for index, sequence in enumerate(sequences) if index % 3 or index % 6 == 0]
    assert names(queue) == [sequence.request.own.request_id for sequence in sorted(left, key=lambda sequence: sequence.rank)]
    assert len(queue) == len(left)


def test_order_is_priority_then_arrival() -> None:
    queue = SequenceQueue()
    for sequence in samples_of([(1, 0), (0, 7), (0, 5), (-1, 9)]):
        queue.push(sequence)
    assert names(queue) == ["s3", "s2", "s1", "s0"]
    assert queue[-1].request.own.request_id == "s0"


def test_removing_a_stranger_is_our_bug() -> None:
    queue = SequenceQueue()
    with pytest.raises(AssertionError, match="not queued"):
        queue.remove(make_sample("a", [1]))


def test_new_requests_wait_while_intake_is_held() -> None:
    old, new, gone, back = samples_of([(0, 1), (-5, 2), (0, 3), (0, 4)])
    queue = WaitingQueue()
    queue.add_new_request(old)
    queue.hold()
    queue.add_new_request(new)
    queue.add_new_request(gone)
    queue.push(back)
    assert names(queue) == ["s0", "s3"]
    assert queue.num_waiting == 4
    queue.remove(gone)
    assert queue.num_waiting == 3
    queue.let_in()
    assert names(queue) == ["s1", "s0", "s3"]
    assert queue.num_waiting == 3


def test_first_level_of_priority_is_worth_one_second() -> None:
    second, wait_ns = 10**9, 30 * 10**9
    assert place_in_line(1, 100 * second, wait_ns) == 101 * second
    assert place_in_line(-1, 100 * second, wait_ns) == 99 * second
    assert place_in_line(14, 100 * second, wait_ns) == (100 * 2 + 15) * second // 2
