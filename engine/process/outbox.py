"""One actor's ring in another's mailbox: sending never blocks, and a full ring is reported. Also a backlog for records that do
not fit.

Created by `ActorContext.outbox` in every child process. An actor that must not lose messages sends them through a
`BackloggedOutbox`, and flushes it every turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.messages import Message, encode
from shm.counters import Cell
from shm.mailbox import MailboxSender

RETRY_INTERVAL_NS = 2_000_000  # a ring that empties wakes no sender


class Outbox:
    """This actor's ring in another's mailbox. It remains the same ring when the receiver restarts."""

    __slots__ = ("_full", "_sender", "_sent", "receiver")

    def __init__(self, receiver: str, sender: MailboxSender, sent: Cell, full: Cell) -> None:
        """`sent` counts messages, `full` counts sends that failed because the ring was full."""
        self.receiver = receiver
        self._sender = sender
        self._sent = sent
        self._full = full

    def send(self, message: Message) -> bool:
        """Put `message` on the ring; return False if the ring is full. Never blocks."""
        return self.send_bytes(encode(message))

    def send_bytes(self, payload: bytes) -> bool:
        """`send` for an encoded message (so that its size can be checked against `max_record_bytes` first)."""
        if self._sender.try_send(payload):
            self._sent.add(1)
            return True
        self._full.add(1)
        return False

    @property
    def max_record_bytes(self) -> int:
        """Size of the largest encoded message that fits the empty ring."""
        return self._sender.max_record_bytes

    @property
    def sent_position(self) -> int:
        """Return the end of the last record sent."""
        return self._sender.sent_position

    @property
    def received_position(self) -> int:
        """Return the end of the last record that the receiver took."""
        return self._sender.received_position

    @property
    def fill_bytes(self) -> int:
        return self._sender.fill_bytes

    def close(self) -> None:
        self._sender.close()


class BackloggedOutbox:
    """Records for a ring that may be full: they wait here, in order, and sending never waits."""

    __slots__ = ("_records", "_try_send")

    def __init__(self, try_send: Callable[[bytes], bool]) -> None:
        """`try_send` puts a record on the ring, or returns False if it is full, such as `Outbox.send_bytes`."""
        self._try_send = try_send
        self._records: deque[bytes] = deque()

    def __len__(self) -> int:
        """Return how many records wait."""
        return len(self._records)

    def post(self, *messages: Message) -> None:
        """Send `messages` with the next `flush`, after those posted before."""
        self.post_records(map(encode, messages))

    def post_records(self, records: Iterable[bytes]) -> None:
        """`post` for encoded messages."""
        self._records.extend(records)

    def flush(self) -> int:
        """Send as much as fits; return the number of records sent."""
        num_sent = 0
        while self._records and self._try_send(self._records[0]):
            self._records.popleft()
            num_sent += 1
        return num_sent

    def clear(self) -> None:
        """Drop the waiting records: their receiver is gone."""
        self._records.clear()

    def deadline_ns(self) -> int:
        """Return the time of the next flush, since a ring that empties wakes no sender; 0 if no record waits."""
        return time.monotonic_ns() + RETRY_INTERVAL_NS if self._records else 0


def earliest(*deadlines_ns: int) -> int:
    """Return the earliest of some deadlines; 0 means none."""
    return min(filter(None, deadlines_ns), default=0)
