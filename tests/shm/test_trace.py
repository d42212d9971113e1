"""The ring of a trace: written events are read once, complete and in order; overwritten ones are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from engine.errors import SharedMemoryError
from engine.process.run_directory import new_run_id
from shm import _native
from shm.segment import segment_name
from shm.trace import MAX_NAMES, TraceRing

NUM_EVENTS = 64


@pytest.fixture
def ring() -> Iterator[TraceRing]:
    ring = TraceRing.create(new_run_id(), "worker0", NUM_EVENTS)
    yield ring
    ring.unlink()


def test_events_are_read_once(ring: TraceRing) -> None:
    writer = ring.writer()
    step, other = writer.name_id("step"), writer.name_id("schlüssel")
    assert writer.name_id("step") == step
    assert writer.record(step, 100, 250, 7, "32 rows")
    assert writer.record(other, 5, 1, -3, "é" * 100, 1)
    first, second = ring.take()
    assert (first.name, first.begin_ns, first.duration_ns, first.value, first.label, first.track) == (
        "step",
        100,
        150,
        7,
        "32 rows",
        0,
    )
    assert (second.name, second.duration_ns, second.value, second.track) == ("schlüssel", 0, -3, 1)
    assert second.label.startswith("é" * 43)
    assert ring.take() == []
    assert ring.num_lost == 0


def test_the_oldest_give_way_and_are_counted(ring: TraceRing) -> None:
    writer = ring.writer()
    name = writer.name_id("event")
    for number in range(3 * NUM_EVENTS):
        writer.record(name, number, number)
    values = [event.begin_ns for event in ring.take()]
    assert values == list(range(3 * NUM_EVENTS - len(values), 3 * NUM_EVENTS))
    assert len(values) + ring.num_lost == 3 * NUM_EVENTS


def test_collected_events_outlive_the_ring(ring: TraceRing) -> None:
    """Includes pieces across its end, overwritten five times before they are decoded."""
    writer = ring.writer()
    name = writer.name_id("event")
    num_each = NUM_EVENTS * 3 // 4
    for number in range(20 * num_each):
        writer.record(name, number, number)
        if (number + 1) % num_each == 0:
            assert ring.collect() == num_each
    ring.unlink()
    assert [event.begin_ns for event in ring.take()] == list(range(20 * num_each))
    assert (ring.num_lost, ring.take()) == (0, [])


def test_restarted_actor_continues_the_ring(ring: TraceRing) -> None:
    """An actor that was restarted, and a reader that comes later."""
    first = ring.writer()
    first.record(first.name_id("step"), 1, 2)
    second = ring.writer()
    second.record(second.name_id("other"), 3, 4)
    second.record(second.name_id("step"), 5, 6)
    later = TraceRing.attach(ring.segment.run_id, "worker0", is_readonly=True)
    assert later is not None
    assert [event.name for event in later.take()] == ["step", "other", "step"]
    with pytest.raises(SharedMemoryError, match="read-only"):
        later.writer()


def test_an_end(ring: TraceRing) -> None:
    writer = ring.writer()
    name = writer.name_id("event")
    now_ns = time.monotonic_ns()
    ring.end(now_ns)
    assert writer.record(name, 0, now_ns)
    assert not writer.record(name, 0, now_ns + 1)
    assert len(ring.take()) == 1


def test_more_names_than_there_is_room_for(ring: TraceRing) -> None:
    writer = ring.writer()
    ids = [writer.name_id(f"name {index}") for index in range(2 * MAX_NAMES)]
    assert max(ids) == MAX_NAMES - 1
    writer.record(ids[-1], 1, 1)
    assert ring.take()[0].name == f"name {MAX_NAMES - 1}"


def test_missing_ring_is_none() -> None:
    assert TraceRing.attach(new_run_id(), "worker0") is None


def test_ring_with_a_wrong_size_is_refused(ring: TraceRing) -> None:
    place = _native.LAYOUT["SegmentHeader"][""][1] + _native.LAYOUT["TraceHeader"]["num_events"][0]
    _native.store_u32(ring.segment.buffer, place, 1 << 30)
    with pytest.raises(SharedMemoryError):
        ring.writer()
    assert TraceRing.attach(ring.segment.run_id, "worker0") is None
    assert segment_name(ring.segment.run_id, "trace", "worker0")


def test_concurrent_reads_get_complete_events(ring: TraceRing) -> None:
    """Reader and writer run at full speed: read events are complete, each once and in order."""
    is_over = threading.Event()

    def write() -> None:
        writer = ring.writer()
        name = writer.name_id("event")
        number = 0
        while not is_over.is_set():
            number += 1
            writer.record(name, number, 2 * number, number, str(number))

    writing = threading.Thread(target=write)
    writing.start()
    last, num_taken = 0, 0
    while num_taken < 3000:
        for event in ring.take():
            assert event.begin_ns == event.duration_ns == event.value == int(event.label)
            assert event.value > last
            last = event.value
            num_taken += 1
    is_over.set()
    writing.join()
