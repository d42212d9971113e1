"""Read-only inspection of a run's rings from outside, for `tokamak top` and `tokamak ctl`."""

from __future__ import annotations

import msgspec

from shm import broadcast, mailbox
from shm.errors import SharedMemoryError
from shm.layout import StructView
from shm.process import ProcessIdentity
from shm.segment import Segment, held_segment_names, own_segment_names

ACTIVE = 2  # ReaderState::ACTIVE


class RingSnapshot(msgspec.Struct, frozen=True):
    """Snapshot of a ring; a broadcast ring has one for each active reader."""

    receiver: str
    sender: str
    capacity_bytes: int
    fill_bytes: int
    num_records: int  # sent since the ring was created
    num_full_waits: int  # sends refused because the ring was full


class SegmentSnapshot(msgspec.Struct, frozen=True):
    """A segment on this machine, and its owner."""

    name: str
    run_id: str
    kind: str
    num_bytes: int
    owner: ProcessIdentity


def rings(run_id: str) -> list[RingSnapshot]:
    """Return every ring of a run, by receiver; empty if the run has ended. An actor of the run sees only the rings passed to
    it."""
    found: list[RingSnapshot] = []
    for name in held_segment_names(run_id) or own_segment_names(run_id):
        try:
            segment = Segment.attach(name, is_readonly=True, timeout_s=0.0)
        except SharedMemoryError:
            continue  # removed meanwhile, or not ready yet
        kind = segment.header.text("kind")
        if kind == mailbox.KIND:
            found += _mailbox_rings(segment.buffer)
        elif kind == broadcast.KIND:
            found += _broadcast_rings(segment.buffer)
    return found


def segments() -> list[SegmentSnapshot]:
    """Return every ready segment of this user's runs on this machine."""
    found = []
    for name in own_segment_names():
        try:
            segment = Segment.attach(name, is_readonly=True, timeout_s=0.0)
        except SharedMemoryError:
            continue
        found.append(SegmentSnapshot(name, segment.run_id, segment.header.text("kind"), segment.buffer.nbytes, segment.owner))
    return found


def _mailbox_rings(buffer: memoryview) -> list[RingSnapshot]:
    capacity = StructView("MailboxHeader", buffer, mailbox.MAILBOX_OFFSET).word("capacity_bytes")
    return [
        _ring(
            StructView("WriterLine", buffer, offset), StructView("ReaderLine", buffer, offset + mailbox.READER_OFFSET), capacity
        )
        for offset in mailbox.ring_offsets(buffer)
    ]


def _broadcast_rings(buffer: memoryview) -> list[RingSnapshot]:
    header = StructView("BroadcastHeader", buffer, broadcast.BROADCAST_OFFSET)
    writer = StructView("WriterLine", buffer, broadcast.WRITER_OFFSET)
    readers = (
        StructView("ReaderLine", buffer, broadcast.READERS_OFFSET + index * broadcast.READER_BYTES)
        for index in range(header.word("num_readers"))
    )
    return [_ring(writer, reader, header.word("capacity_bytes")) for reader in readers if reader.word("state") == ACTIVE]


def _ring(writer: StructView, reader: StructView, capacity_bytes: int) -> RingSnapshot:
    head = reader.word("head")  # before tail, so that the fill is never negative
    return RingSnapshot(
        receiver=reader.text("owner"),
        sender=writer.text("owner"),
        capacity_bytes=capacity_bytes,
        fill_bytes=writer.word("tail") - head,
        num_records=writer.word("num_records"),
        num_full_waits=writer.word("num_full_waits"),
    )
