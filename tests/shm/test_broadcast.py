"""Properties of a broadcast ring beyond those of a ring: readers that join, lag, leave and are evicted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shm.broadcast import BroadcastReader, BroadcastWriter, ReaderBells
from shm.errors import SharedMemoryError


def open_writer(run_id: str, num_readers: int = 2) -> BroadcastWriter:
    BroadcastWriter.create(run_id, "scheduler", num_readers, 1024)
    return BroadcastWriter.attach(run_id, "scheduler", 1)


def open_reader(run_id: str, reader: int, epoch: int = 1) -> BroadcastReader:
    return BroadcastReader.attach(run_id, "scheduler", reader, epoch)


def fill(writer: BroadcastWriter) -> int:
    num_sent = 0
    while writer.try_send(b"x" * 100):
        num_sent += 1
    return num_sent


def test_every_reader_gets_every_record(run_id: str) -> None:
    writer = open_writer(run_id)
    readers = [open_reader(run_id, 0), open_reader(run_id, 1)]
    for number in range(50):
        assert writer.try_send(b"%d" % number)
        assert [reader.receive() for reader in readers] == [[b"%d" % number]] * 2


def test_records_without_readers_are_dropped(run_id: str) -> None:
    writer = open_writer(run_id)
    assert writer.active_readers() == []
    for _ in range(100):
        assert writer.try_send(b"x" * 100)
    assert writer.fill_bytes == 0


def test_new_request_joins_at_the_tail(run_id: str) -> None:
    writer = open_writer(run_id)
    writer.try_send(b"before")
    reader = open_reader(run_id, 1)
    assert not reader.is_active
    assert reader.receive() == []
    assert not reader.wait(0)
    writer.try_send(b"after")
    assert reader.is_active
    assert writer.active_readers() == [1]
    assert reader.receive() == [b"after"]


def test_writer_waits_for_the_slowest_active_reader_only(run_id: str) -> None:
    writer = open_writer(run_id)
    fast, slow = open_reader(run_id, 0), open_reader(run_id, 1)
    assert fill(writer) == 8
    assert len(fast.receive()) == 8
    assert not writer.try_send(b"x" * 100)
    assert writer.num_full_waits == 2
    slow.leave()
    assert fill(writer) == 8
    assert writer.active_readers() == [0]
    assert len(fast.receive()) == 8
    with pytest.raises(SharedMemoryError, match="reader 1 of epoch 1 has left"):
        slow.receive()


def test_evicted_reader_frees_the_writer(run_id: str) -> None:
    writer = open_writer(run_id)
    supervisor = BroadcastWriter.attach(run_id, "scheduler", 1)
    fast, slow = open_reader(run_id, 0), open_reader(run_id, 1)
    fill(writer)
    fast.receive()
    supervisor.evict(1)
    assert writer.try_send(b"x" * 100)
    assert writer.active_readers() == [0]
    assert slow.wait(60_000_000_000)
    with pytest.raises(SharedMemoryError, match="reader 1 of epoch 1 was evicted; attach again to join at the tail"):
        slow.receive()


def test_replaced_reader_gets_an_error(run_id: str) -> None:
    writer = open_writer(run_id)
    old = open_reader(run_id, 0, epoch=1)
    fill(writer)
    new = open_reader(run_id, 0, epoch=2)
    assert writer.try_send(b"for the new one")
    assert new.receive() == [b"for the new one"]
    assert old.wait(0)
    with pytest.raises(SharedMemoryError, match="was replaced by epoch 2"):
        old.receive()
    old.leave()
    assert new.is_active


def test_reader_evicted_before_it_was_admitted_stays_out(run_id: str) -> None:
    writer = open_writer(run_id)
    reader = open_reader(run_id, 0)
    writer.evict(0)
    assert writer.active_readers() == []
    with pytest.raises(SharedMemoryError, match="was evicted"):
        reader.receive()
    again = open_reader(run_id, 0, epoch=2)
    writer.try_send(b"welcome")
    assert again.receive() == [b"welcome"]


def test_new_writer_keeps_readers_and_unread_records(run_id: str) -> None:
    writer = open_writer(run_id)
    reader = open_reader(run_id, 0)
    writer.try_send(b"old")
    successor = BroadcastWriter.attach(run_id, "scheduler", 2)
    assert successor.active_readers() == [0]
    assert successor.try_send(b"new")
    assert reader.receive() == [b"old", b"new"]
    reader.receive()
    assert fill(successor) >= 7


def test_places_are_checked(run_id: str) -> None:
    writer = open_writer(run_id, num_readers=2)
    for use in (lambda: open_reader(run_id, 2), lambda: writer.evict(2)):
        with pytest.raises(SharedMemoryError, match="no reader 2, it has places for 2"):
            use()
    with pytest.raises(SharedMemoryError, match="0 readers"):
        BroadcastWriter.create(run_id, "cache", 0, 1024)


def test_reader_overtaken_while_copying_gets_an_error(run_id: str) -> None:
    """A reader that was evicted as dead copies while the writer overwrites the record."""
    writer = open_writer(run_id)
    slow = open_reader(run_id, 0)
    writer.try_send(b"first")
    assert slow.receive() == [b"first"]
    writer.evict(0)
    for _ in range(100):
        writer.try_send(bytes(99))
    with pytest.raises(SharedMemoryError, match="was evicted"):
        slow.receive()


def test_reader_wakes_when_its_watched_word_changes(run_id: str) -> None:
    """The reader sleeps until a record comes or the watched word changes, whichever is first."""
    writer, word = open_writer(run_id), memoryview(bytearray(16))
    reader, bells = open_reader(run_id, 1), ReaderBells(run_id, "scheduler", [0, 1])
    reader.watch(word, 8, 0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(reader.wait, 60_000_000_000)
        word[8] = 1
        bells.ring()
        assert waiting.result(60)
    assert reader.wait(0)  # as long as the word is not what was seen
    reader.watch(word, 8, 1)
    assert not reader.wait(0)
    writer.try_send(b"to nobody")
    writer.try_send(b"first")
    reader.receive()
    writer.try_send(b"record")
    assert reader.wait(0)
    bells.close()
