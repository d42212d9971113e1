"""The other processes of the stress tests: `python -m tests.shm.peers <peer> <arguments>`.

Peers that get killed are forked by a nursery process, which is much faster than starting an interpreter for each life, so a
test can afford hundreds of deaths. They report progress through words of a memory file ("board"), the only way for a process
that is killed at any moment.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable

from shm import _native
from shm.broadcast import BroadcastReader, BroadcastWriter
from shm.mailbox import Mailbox, MailboxSender
from shm.segment import MemoryFile

BOARD_BYTES = 4096
MAX_STALLS = 20  # of a whole machine between a store and a wake, in a test
LARGE = 40_000  # bytes: with a checksum and a copy of this size, most kills fall into the middle of a record


def record(epoch: int, number: int, size: int) -> bytes:
    """Return a record of about `size` bytes that can be checked: checksum, then epoch and number over and over."""
    body = (epoch.to_bytes(4, "little") + number.to_bytes(8, "little")) * (1 + size // 12)
    return zlib.crc32(body).to_bytes(4, "little") + body


def check(payload: bytes) -> tuple[int, int]:
    """Return (epoch, number) of a record, after checking that it is complete."""
    if zlib.crc32(payload[4:]) != int.from_bytes(payload[:4], "little"):
        raise AssertionError(f"a corrupt record of {len(payload)} bytes")
    return int.from_bytes(payload[4:8], "little"), int.from_bytes(payload[8:16], "little")


def send(try_send: Callable[[bytes], bool], payload: bytes) -> None:
    """Send until it is accepted, yielding the processor to the reader in between."""
    while not try_send(payload):
        os.sched_yield()


def sizes(seed: int, largest: int) -> Callable[[], int]:
    """Yield mostly small sizes, sometimes the maximum."""
    draw = random.Random(seed)
    return lambda: draw.choice((0, 16, 100, 1000, draw.randrange(largest)))


def stream_to_mailbox(run_id: str, num_records: str) -> None:
    sender = MailboxSender.attach(run_id, "receiver", "sender", 1)
    size = sizes(1, sender.max_record_bytes - 16)
    for number in range(1, int(num_records) + 1):
        send(sender.try_send, record(1, number, size()))


def stream_to_broadcast(run_id: str, num_records: str) -> None:
    writer = BroadcastWriter.attach(run_id, "sender", 1)
    while len(writer.active_readers()) < 2:
        os.sched_yield()
    size = sizes(1, writer.max_record_bytes - 16)
    for number in range(1, int(num_records) + 1):
        send(writer.try_send, record(1, number, size()))


def echo(run_id: str, num_records: str) -> None:
    """Answer each record, sleeping on the doorbell in between; exit with 1 where many wakes came late."""
    mailbox = Mailbox.attach(run_id, "echo", 1)
    sender = MailboxSender.attach(run_id, "caller", "echo", 1)
    for _ in range(int(num_records)):
        while not mailbox.wait(30_000_000_000):
            pass
        ((_, payload),) = mailbox.receive()
        send(sender.try_send, payload)
    sys.exit(mailbox.num_late_wakes > MAX_STALLS)


def nursery(live: Callable[[int], None], num_lives: int, seed: int, progress: Callable[[], int]) -> None:
    """Fork `live(epoch)`, let it do some work, kill it within a millisecond or two; repeat."""
    draw = random.Random(seed)
    for epoch in range(1, num_lives + 1):
        before = progress()
        child = os.fork()
        if child == 0:
            live(epoch)
            os._exit(1)
        while progress() == before:
            time.sleep(0.0002)
        time.sleep(draw.random() * 0.002)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise AssertionError(f"life {epoch} ended by itself: {status}")


def dying_writers(run_id: str, board_fd: str, num_lives: str) -> None:
    """Each life sends numbered records without end and writes the last accepted one to the board, at word `epoch`."""
    board = MemoryFile.from_fd(int(board_fd), BOARD_BYTES).buffer

    def live(epoch: int) -> None:
        sender = MailboxSender.attach(run_id, "receiver", "sender", epoch)
        size = sizes(epoch, LARGE)
        number = 0
        while True:
            number += 1
            send(sender.try_send, record(epoch, number, size()))
            _native.store_u64(board, 8 * epoch, number)
            _native.fetch_add_u64(board, 0, 1)

    nursery(live, int(num_lives), 1, lambda: _native.load_u64(board, 0))


def dying_readers(run_id: str, board_fd: str, num_lives: str) -> None:
    """Each life takes records one by one and checks that their numbers continue; the board has the last number taken at word 1,
    and at word 2 how many records were lost with a reader."""
    board = MemoryFile.from_fd(int(board_fd), BOARD_BYTES).buffer

    def live(epoch: int) -> None:
        mailbox = Mailbox.attach(run_id, "receiver", epoch)
        is_first = True
        while True:
            mailbox.wait(1_000_000_000)
            for _, payload in mailbox.receive(1):
                _, number = check(payload)
                last = _native.load_u64(board, 8)
                if number not in ((last + 1, last + 2) if is_first else (last + 1,)):
                    os._exit(2)
                if number == last + 2:
                    _native.fetch_add_u64(board, 16, 1)
                is_first = False
                _native.store_u64(board, 8, number)
                _native.fetch_add_u64(board, 0, 1)

    nursery(live, int(num_lives), 2, lambda: _native.load_u64(board, 0))


def dying_broadcast_readers(run_id: str, board_fd: str, num_lives: str) -> None:
    """Reader 1 of a broadcast ring: each life must see complete records without a gap from the one it joined at; between two
    lives it is evicted, as the supervisor does."""
    board = MemoryFile.from_fd(int(board_fd), BOARD_BYTES).buffer
    supervisor = BroadcastWriter.attach(run_id, "sender", 1)

    def live(epoch: int) -> None:
        supervisor.evict(1)
        reader = BroadcastReader.attach(run_id, "sender", 1, epoch)
        last = 0
        while True:
            reader.wait(1_000_000_000)
            for payload in reader.receive(4):
                _, number = check(payload)
                if last and number != last + 1:
                    os._exit(2)
                last = number
                _native.fetch_add_u64(board, 0, 1)

    nursery(live, int(num_lives), 3, lambda: _native.load_u64(board, 0))
    supervisor.evict(1)


PEERS = (stream_to_mailbox, stream_to_broadcast, echo, dying_writers, dying_readers, dying_broadcast_readers)

if __name__ == "__main__":
    {peer.__name__: peer for peer in PEERS}[sys.argv[1]](*sys.argv[2:])
