"""One view of both kinds of ring, for the suite that both must pass."""

from __future__ import annotations

import secrets

from shm.broadcast import KIND as BROADCAST_KIND
from shm.broadcast import READER_BYTES, READERS_OFFSET, WRITER_OFFSET, BroadcastReader, BroadcastWriter
from shm.layout import StructView
from shm.mailbox import KIND as MAILBOX_KIND
from shm.mailbox import READER_OFFSET, RING_HEADER_BYTES, Mailbox, MailboxSender, ring_offsets
from shm.segment import Segment, segment_name


class MailboxLink:
    """A mailbox with one ring."""

    continues_after_reader = True  # a new reader finds what the old one left

    def __init__(self, run_id: str = "", ring_bytes: int = 1024) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        self.owner = Mailbox.create(self.run_id, "receiver", ["sender"], ring_bytes)
        self.open_reader(1)
        self.open_writer(1)

    def open_reader(self, epoch: int) -> None:
        self.reader = Mailbox.attach(self.run_id, "receiver", epoch)

    def open_writer(self, epoch: int) -> None:
        self.writer = MailboxSender.attach(self.run_id, "receiver", "sender", epoch)

    def receive(self, max_records: int = 256) -> list[bytes]:
        return [payload for _, payload in self.reader.receive(max_records)]

    def views(self) -> tuple[memoryview, StructView, StructView, int]:
        """Return the segment, its writer and reader line, and the offset of the data, for tests that damage or inspect them."""
        buffer = Segment.attach(segment_name(self.run_id, MAILBOX_KIND, "receiver")).buffer
        (ring,) = ring_offsets(buffer)
        reader = StructView("ReaderLine", buffer, ring + READER_OFFSET)
        return buffer, StructView("WriterLine", buffer, ring), reader, ring + RING_HEADER_BYTES

    def unlink(self) -> None:
        self.owner.unlink()


class BroadcastLink:
    """A broadcast ring with one reader."""

    continues_after_reader = False  # a new reader joins at the tail

    def __init__(self, run_id: str = "", ring_bytes: int = 1024) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        self.owner = BroadcastWriter.create(self.run_id, "sender", 1, ring_bytes, ["receiver"])
        self.open_writer(1)
        self.open_reader(1)

    def open_reader(self, epoch: int) -> None:
        self.reader = BroadcastReader.attach(self.run_id, "sender", 0, epoch)
        assert self.writer.active_readers() == [0]

    def open_writer(self, epoch: int) -> None:
        self.writer = BroadcastWriter.attach(self.run_id, "sender", epoch)

    def receive(self, max_records: int = 256) -> list[bytes]:
        return self.reader.receive(max_records)

    def views(self) -> tuple[memoryview, StructView, StructView, int]:
        buffer = Segment.attach(segment_name(self.run_id, BROADCAST_KIND, "sender")).buffer
        reader = StructView("ReaderLine", buffer, READERS_OFFSET)
        return buffer, StructView("WriterLine", buffer, WRITER_OFFSET), reader, READERS_OFFSET + READER_BYTES

    def unlink(self) -> None:
        self.owner.unlink()


Link = MailboxLink | BroadcastLink
