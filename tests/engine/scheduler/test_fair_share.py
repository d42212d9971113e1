"""A source with many requests delays only itself: sequences begin in turns between sources, and between the requests of
each."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.queues import WaitingQueue
from engine.scheduler.sequence import Sequence
from tests.engine.scheduler.sequences import make_limits, make_sample
from tests.engine.scheduler.test_policy import World
from tests.requests import with_shared

SECOND_NS = 1_000_000_000


def sample(source: str, key: str, order: int, *, priority: int = 0, arrival_ns: int = -1, num_tokens: int = 1) -> Sequence:
    arrival_ns = order if arrival_ns < 0 else arrival_ns
    found = make_sample(f"{key}~p{order}", [1] * num_tokens, 1, priority, arrival_ns, order)
    found.request = with_shared(found.request, key=key, source=source)
    return found


def key_of(sequence: Sequence) -> str:
    return sequence.request.shared.key


def owners(queue: WaitingQueue) -> str:
    return "".join(map(key_of, queue))


def test_sources_and_their_requests_take_turns() -> None:
    queue = WaitingQueue()
    for order, name in enumerate(["1A"] * 5 + ["1B"] * 2 + ["2C"] * 3 + ["3D"]):
        queue.push(sample(name[0], name[1], order))
    assert owners(queue) == "ACDBCACBAAA"


def test_source_with_more_running_goes_later() -> None:
    queue = WaitingQueue()
    many = [sample("1", "A", order) for order in range(5)]
    for sequence in many:
        queue.push(sequence)
    for sequence in many[:2]:
        queue.remove(sequence)
        queue.began(sequence)
    queue.push(sample("2", "B", 8))
    queue.push(sample("2", "B", 9))
    assert owners(queue) == "BBAAA"
    for sequence in many[:2]:
        queue.ended(sequence)
    assert owners(queue) == "ABABA"  # all were there before B came


def test_sources_take_precedence_over_priority() -> None:
    """The best priority gives a source no more turns than the others."""
    queue = WaitingQueue()
    for order in range(3):
        queue.push(sample("1", "A", order, priority=1, arrival_ns=0))
    for order in range(3, 5):
        queue.push(sample("2", "B", order, arrival_ns=2 * SECOND_NS))
    queue.push(sample("3", "C", 5, priority=-8, arrival_ns=3 * SECOND_NS))
    queue.push(sample("3", "C", 6, priority=-8, arrival_ns=3 * SECOND_NS))
    assert owners(queue) == "CABCABA"


def test_priority_orders_the_requests_of_a_source() -> None:
    queue = WaitingQueue()
    for order, (key, priority) in enumerate([("A", 1), ("B", 0), ("C", -8), ("D", -8), ("E", 1)]):
        queue.push(sample("1", key, order, priority=priority, arrival_ns=0))
    assert owners(queue) == "CDBAE"


@pytest.mark.parametrize("priority", [-(2**31), 0])
def test_flood_with_best_priority_delays_no_other_source(priority: int) -> None:
    world = World(make_limits(max_tokens=64, max_running=4, has_prefix_cache=False), 64)
    world.add(*(sample("1", f"A{order}", order, priority=priority, num_tokens=12) for order in range(40)))
    world.dispatch()
    small = sample("2", "B", 50, priority=2**31)
    world.add(small)
    for _ in range(2):
        world.land()
        world.dispatch()
    assert small not in list(world.batch.waiting)


def test_small_request_waits_only_for_steps_in_flight() -> None:
    """A small request with 1,000 sequences before it, of another source or of its own."""
    world = World(make_limits(max_tokens=16, max_running=8, has_prefix_cache=False), 64)
    world.add(*(sample("1", "A", order, num_tokens=12) for order in range(1000)))
    for source, key, order in (("2", "B", 2000), ("1", "C", 2001)):
        world.dispatch()
        world.dispatch()
        small = sample(source, key, order)
        world.add(small)
        num_waited = 0
        while small in world.batch.waiting:
            world.dispatch()
            world.land()
            num_waited += 1
        assert num_waited <= 2


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("123"), st.sampled_from("AB"), st.integers(-3, 3), st.integers(1, 30)), max_size=30),
    st.randoms(use_true_random=False),
)
def test_every_sequence_is_served_once(max_running: int, wanted: list[tuple[str, str, int, int]], chance: object) -> None:
    """Sequences are also preempted, or leave while they wait; the source with the fewest gets the next turn."""
    world = World(make_limits(max_tokens=16, max_running=max_running), 16)
    waiting = [
        sample(source, source + key, order, priority=priority, num_tokens=size)
        for order, (source, key, priority, size) in enumerate(wanted)
    ]
    while waiting:
        world.add(waiting.pop(0))
        queue = world.batch.waiting
        found = list(queue)
        assert sorted(map(id, found)) == sorted(id(queue[index]) for index in range(len(queue)))
        for _, same in groupby(sorted(found, key=key_of), key=key_of):
            ranks = [each.rank for each in same if each.rank[1] == 0]
            assert ranks == sorted(ranks)  # of one request in their order
        if chance.random() < 0.5:  # type: ignore[attr-defined]
            world.dispatch()
        if world.flights and chance.random() < 0.5:  # type: ignore[attr-defined]
            world.land()
        if len(queue) and chance.random() < 0.1:  # type: ignore[attr-defined]
            world.batch.finish(queue[0])
    world.run_to_the_end()


def test_single_slot_source_still_yields() -> None:
    """None of its sequences runs at the moment when the slot is free, but it was served last."""
    world = World(make_limits(max_running=1), 64)
    world.add(*(sample("1", "A", order) for order in range(10)))
    world.dispatch()
    small = sample("2", "B", 20)
    world.add(small)
    for _ in range(2):
        world.land()
        world.dispatch()
    assert small not in list(world.batch.waiting)


def test_new_sources_do_not_starve_an_old_one() -> None:
    world = World(make_limits(max_running=1), 64)
    first, second = sample("1", "A", 0), sample("1", "A", 1)
    world.add(first, second)
    for order in range(2, 9):
        world.add(sample(f"new {order}", f"N{order}", order))
        world.dispatch()
        world.land()
        if second not in world.batch.sequences.values():
            break
    assert order <= 4
