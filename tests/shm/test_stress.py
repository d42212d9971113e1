"""Two processes on one ring: under load, and with one of them killed again and again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shm import _native
from shm.broadcast import BroadcastReader, BroadcastWriter
from shm.mailbox import Mailbox, MailboxSender
from shm.segment import MemoryFile
from tests.shm.peers import BOARD_BYTES, MAX_STALLS, check, record, send, sizes
from tests.waiting import WATCHDOG_S

pytestmark = pytest.mark.slow

SECOND = 1_000_000_000
NUM_LIVES = 150


@contextmanager
def peer(name: str, *arguments: object, board: MemoryFile | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a peer's process, which must end without an error."""
    command = [sys.executable, "-m", "tests.shm.peers", name, *map(str, arguments)]
    process = subprocess.Popen(command, pass_fds=[board.fd] if board else [])
    try:
        yield process
        process.wait(WATCHDOG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


@pytest.fixture
def board() -> Iterator[MemoryFile]:
    board = MemoryFile.create("board", BOARD_BYTES)
    yield board
    board.close()


@pytest.mark.parametrize("ring_bytes", [4096, 1 << 18])
def test_mailbox_carries_every_record_between_processes(run_id: str, ring_bytes: int) -> None:
    num_records = 200_000 if ring_bytes == 4096 else 20_000  # the records are larger in the larger ring
    Mailbox.create(run_id, "receiver", ["sender"], ring_bytes)
    mailbox = Mailbox.attach(run_id, "receiver", 1)
    expected = 0
    with peer("stream_to_mailbox", run_id, num_records) as process:
        while expected < num_records:
            assert mailbox.wait(30 * SECOND) or process.poll() is None
            for _, payload in mailbox.receive():
                expected += 1
                assert check(payload) == (1, expected)
    assert mailbox.receive() == []


def test_broadcast_carries_every_record_to_every_process(run_id: str) -> None:
    num_records = 40_000
    BroadcastWriter.create(run_id, "sender", 2, 8192)
    readers = [BroadcastReader.attach(run_id, "sender", index, 1) for index in range(2)]
    expected = [0, 0]
    with peer("stream_to_broadcast", run_id, num_records):
        while min(expected) < num_records:
            assert readers[expected.index(min(expected))].wait(30 * SECOND)  # the writer may be waiting for the slower one
            for index, reader in enumerate(readers):
                for payload in reader.receive(1 + index * 100):
                    expected[index] += 1
                    assert check(payload) == (1, expected[index])


@pytest.mark.parametrize("spin_ns", [0, 5_000])
def test_no_wake_is_lost(run_id: str, spin_ns: int) -> None:
    """Each side sleeps for the other in each round. A send that does not wake would show as a sleep that ran out (100 ms) with
    the record there, in each round; so does a machine that stalls for that long between a store and a system call, now and
    then. Wakes that are lost in a race are the concern of test_programs.py."""
    num_rounds = 20_000
    Mailbox.create(run_id, "echo", ["caller"], 1024)
    Mailbox.create(run_id, "caller", ["echo"], 1024)
    mailbox = Mailbox.attach(run_id, "caller", 1)
    mailbox.spin_ns = spin_ns
    sender = MailboxSender.attach(run_id, "echo", "caller", 1)
    with peer("echo", run_id, num_rounds):
        for number in range(num_rounds):
            send(sender.try_send, b"%d" % number)
            while not mailbox.wait(30 * SECOND):
                pass
            assert mailbox.receive() == [("echo", b"%d" % number)]
    assert mailbox.num_late_wakes <= MAX_STALLS


def test_killed_writers_lose_and_corrupt_nothing(run_id: str, board: MemoryFile) -> None:
    """Every record that a writer saw accepted arrives, complete and in order; so may the one in progress at its death."""
    Mailbox.create(run_id, "receiver", ["sender"], 1 << 18)
    mailbox = Mailbox.attach(run_id, "receiver", 1)
    last_of: dict[int, int] = {}

    def receive() -> bool:
        records = mailbox.receive()
        for _, payload in records:
            epoch, number = check(payload)
            assert epoch >= max(last_of, default=0)
            assert number == last_of.get(epoch, 0) + 1
            last_of[epoch] = number
        return bool(records)

    with peer("dying_writers", run_id, board.fd, NUM_LIVES, board=board) as process:
        while process.poll() is None:
            mailbox.wait(10_000_000)
            receive()
        while receive():
            pass
    accepted = {epoch: _native.load_u64(board.buffer, 8 * epoch) for epoch in range(1, NUM_LIVES + 1)}
    assert set(last_of) == set(accepted)
    assert all(last_of[epoch] - accepted[epoch] in (0, 1) for epoch in accepted)


def test_killed_readers_lose_at_most_a_record_each(run_id: str, board: MemoryFile) -> None:
    Mailbox.create(run_id, "receiver", ["sender"], 1 << 18)
    sender = MailboxSender.attach(run_id, "receiver", "sender", 1)
    size = sizes(1, 40_000)
    number = 0
    with peer("dying_readers", run_id, board.fd, NUM_LIVES, board=board) as process:
        while process.poll() is None:
            if sender.try_send(record(1, number + 1, size())):
                number += 1
    taken, num_in_hand = (_native.load_u64(board.buffer, 8 * word) for word in (1, 2))
    assert num_in_hand <= NUM_LIVES
    mailbox = Mailbox.attach(run_id, "receiver", NUM_LIVES + 1)
    left = [check(payload)[1] for _, payload in mailbox.receive(1 << 20)]
    assert left in (list(range(taken + 1, number + 1)), list(range(taken + 2, number + 1)))


def test_killed_broadcast_readers_do_not_block_the_writer(run_id: str, board: MemoryFile) -> None:
    BroadcastWriter.create(run_id, "sender", 2, 1 << 18)
    writer = BroadcastWriter.attach(run_id, "sender", 1)
    steady = BroadcastReader.attach(run_id, "sender", 0, 1)
    size = sizes(1, 40_000)
    number = received = 0
    with peer("dying_broadcast_readers", run_id, board.fd, NUM_LIVES, board=board) as process:
        while process.poll() is None:
            if writer.try_send(record(1, number + 1, size())):
                number += 1
            for payload in steady.receive():
                received += 1
                assert check(payload) == (1, received)
    assert writer.active_readers() == [0]
    assert number == received > NUM_LIVES
