"""Mailboxes: how actors send each other records.

A mailbox belongs to one receiver. It has one SPSC ring for each sender, so that a dead sender blocks no other, and one doorbell
for all. The supervisor creates all mailboxes; the receiver attaches a `Mailbox`, each sender a `MailboxSender`. Senders never
block: a send to a full ring is refused.

Waiting: a reader spins for `spin_ns` before it sleeps if its last wait was short (100 us), yielding its core in between;
otherwise it sleeps at once. Measured on two cores (`tokamak bench shm`, back to back, 256 B, one way): with the two processes
on different cores 1.8 us instead of 20 us without the spin; on one core, or on a busy machine, 5.1 us instead of 6.0 us, while
a spin without yielding costs 59 us. A record that comes a millisecond after the last finds the reader asleep either way.

A record arrives whole or not at all. If the writer is killed while sending, the record was not sent; if the reader is killed
while receiving, its next life receives it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shm import _native
from shm.errors import SharedMemoryError
from shm.layout import LINE, StructView, round_up, size_of
from shm.segment import Segment, segment_name

KIND = "mailbox"
MAILBOX_OFFSET = size_of("SegmentHeader")
RINGS_OFFSET = MAILBOX_OFFSET + size_of("MailboxHeader") + size_of("DoorbellLine")
READER_OFFSET = size_of("WriterLine")  # of the ReaderLine in a ring
RING_HEADER_BYTES = size_of("WriterLine") + size_of("ReaderLine")
MIN_RING_BYTES = 1024
MAX_RING_BYTES = 1 << 31
DEFAULT_SPIN_NS = 20_000


class Mailbox:
    """The receiver's end (and, from `create`, the supervisor's handle to unlink it)."""

    def __init__(self, segment: Segment, epoch: int) -> None:
        self.segment = segment
        self.senders = ring_senders(segment.buffer)
        self.max_record_bytes = max_record_bytes(segment.buffer)
        self.spin_ns = DEFAULT_SPIN_NS
        self._reader = _native.MailboxReader(segment.buffer, self.senders, epoch)

    @classmethod
    def create(cls, run_id: str, receiver: str, senders: Sequence[str], ring_bytes: int) -> Mailbox:
        """Create a mailbox with a ring of at least `ring_bytes` for each sender; the first is the control ring."""
        if not senders or len(set(senders)) != len(senders):
            raise SharedMemoryError(f"mailbox of {receiver}: senders {list(senders)} must be distinct, and at least one")
        capacity = ring_capacity(ring_bytes)
        stride = RING_HEADER_BYTES + capacity

        def initialise(buffer: memoryview) -> None:
            header = StructView("MailboxHeader", buffer, MAILBOX_OFFSET)
            header.set_word("capacity_bytes", capacity)
            header.set_word("rings_offset", RINGS_OFFSET)
            header.set_word("ring_stride", stride)
            header.set_word("num_rings", len(senders))
            for index, sender in enumerate(senders):
                offset = RINGS_OFFSET + index * stride
                StructView("WriterLine", buffer, offset).set_text("owner", sender)
                StructView("ReaderLine", buffer, offset + READER_OFFSET).set_text("owner", receiver)

        name = segment_name(run_id, KIND, receiver)
        return cls(Segment.create(name, RINGS_OFFSET + len(senders) * stride, initialise), epoch=0)

    @classmethod
    def attach(cls, run_id: str, receiver: str, epoch: int) -> Mailbox:
        """Attach the receiver in its life `epoch`; it continues where the last one stopped."""
        return cls(Segment.attach(segment_name(run_id, KIND, receiver)), epoch)

    def receive(self, max_records: int = 256) -> list[tuple[str, bytes]]:
        """Return the records received, as (sender, payload): first the control ring, then one record of each other ring in
        turn. Records of one sender stay in order. SharedMemoryError if a ring is corrupt."""
        return self._reader.receive(max_records)

    def wait(self, timeout_ns: int) -> bool:
        """Sleep until there is a record (True) or until the timeout. The GIL is released; Python's signal handlers run at once
        or, in a rare race, within 100 ms."""
        return wait_in_slices(self._reader, timeout_ns, self.spin_ns)

    def hold(self, sender: str, is_held: bool) -> None:
        """Leave the records of a sender in its ring, or take them again: a full ring is then the sender's concern."""
        self._reader.hold(self.senders.index(sender), is_held)

    @property
    def num_late_wakes(self) -> int:
        """Sleeps that timed out although a record was there: its sender died or was delayed between publishing and waking."""
        return self._reader.num_late_wakes

    def close(self) -> None:
        del self._reader
        self.segment.close()

    def unlink(self) -> None:
        self.segment.unlink()


class MailboxSender:
    """One sender's end."""

    def __init__(self, segment: Segment, ring: int, epoch: int) -> None:
        self.segment = segment
        offset = ring_offsets(segment.buffer)[ring]
        self._written = StructView("WriterLine", segment.buffer, offset)
        self._read = StructView("ReaderLine", segment.buffer, offset + READER_OFFSET)
        self._writer = _native.MailboxWriter(segment.buffer, ring, epoch)
        self.max_record_bytes = self._writer.max_record_bytes

    @classmethod
    def attach(cls, run_id: str, receiver: str, sender: str, epoch: int) -> MailboxSender:
        """Attach `sender` in its life `epoch`; it continues after the last published record."""
        segment = Segment.attach(segment_name(run_id, KIND, receiver))
        senders = ring_senders(segment.buffer)
        if sender not in senders:
            raise SharedMemoryError(f"mailbox of {receiver} has no ring for {sender}, only for {', '.join(senders)}")
        return cls(segment, senders.index(sender), epoch)

    def try_send(self, payload: bytes | bytearray) -> bool:
        """Send a record. Return False if the ring has no room. SharedMemoryError if it is larger than `max_record_bytes`."""
        return self._writer.try_send(payload)

    @property
    def fill_bytes(self) -> int:
        """Bytes sent and not yet received, headers included."""
        return self._writer.fill_bytes

    @property
    def sent_position(self) -> int:
        """Return the end of the last sent record; it only grows."""
        return self._written.word("tail")

    @property
    def received_position(self) -> int:
        """Return the end of the last received record."""
        return self._read.word("head")

    @property
    def num_full_waits(self) -> int:
        """Sends refused because the ring was full, since the ring was created."""
        return self._writer.num_full_waits

    def close(self) -> None:
        del self._writer, self._written, self._read
        self.segment.close()


def ring_capacity(ring_bytes: int) -> int:
    """Return the capacity of a ring of at least `ring_bytes`. Lengths in records have 32 bits."""
    if ring_bytes > MAX_RING_BYTES:
        raise SharedMemoryError(
            f"a ring of {ring_bytes} bytes is too large, the limit is {MAX_RING_BYTES}; send large data by slab"
        )
    return round_up(max(ring_bytes, MIN_RING_BYTES), LINE)


def max_record_bytes(buffer: memoryview) -> int:
    """Return the size of the largest record that the rings of a mailbox accept."""
    return StructView("MailboxHeader", buffer, MAILBOX_OFFSET).word("capacity_bytes") // 2 - size_of("RecordHeader")


def ring_offsets(buffer: memoryview) -> list[int]:
    """Return the offsets of the rings of a mailbox."""
    header = StructView("MailboxHeader", buffer, MAILBOX_OFFSET)
    rings, stride = header.word("rings_offset"), header.word("ring_stride")
    return [rings + index * stride for index in range(header.word("num_rings"))]


def ring_senders(buffer: memoryview) -> list[str]:
    return [StructView("WriterLine", buffer, offset).text("owner") for offset in ring_offsets(buffer)]


def wait_in_slices(reader: _native.MailboxReader | _native.BroadcastReader, timeout_ns: int, spin_ns: int) -> bool:
    """Wait natively in slices of at most 100 ms, or until a signal, so that its handler can run in between."""
    deadline = time.monotonic_ns() + timeout_ns
    while not reader.wait(timeout_ns, spin_ns):
        timeout_ns = deadline - time.monotonic_ns()
        if timeout_ns <= 0:
            return False
    return True
