"""The broadcast ring: one writer (the scheduler) and a reading position for each reader (the ranks).

The supervisor creates it and evicts dead readers; the scheduler attaches the writer, each worker a reader. The writer waits
only for the slowest active reader. A new reader joins at the tail: the writer admits it before its next send, and that record
is the reader's first.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm import _native
from shm.errors import SharedMemoryError
from shm.layout import StructView, size_of
from shm.mailbox import DEFAULT_SPIN_NS, ring_capacity, wait_in_slices
from shm.segment import Segment, segment_name

KIND = "broadcast"
BROADCAST_OFFSET = size_of("SegmentHeader")
WRITER_OFFSET = BROADCAST_OFFSET + size_of("BroadcastHeader")
READERS_OFFSET = WRITER_OFFSET + size_of("WriterLine")
READER_BYTES = size_of("ReaderLine") + size_of("DoorbellLine")


class BroadcastWriter:
    """The writer's end (and, from `create`, the supervisor's handle to evict readers and to unlink it)."""

    def __init__(self, segment: Segment, epoch: int) -> None:
        self.segment = segment
        self._writer = _native.BroadcastWriter(segment.buffer, epoch)
        self.max_record_bytes = self._writer.max_record_bytes

    @classmethod
    def create(
        cls, run_id: str, name: str, num_readers: int, ring_bytes: int, reader_names: Sequence[str] | None = None
    ) -> BroadcastWriter:
        """Create a ring of at least `ring_bytes` for the writer `name`. Readers are called worker0, worker1, ... by default."""
        names = [f"worker{index}" for index in range(num_readers)] if reader_names is None else list(reader_names)
        if num_readers < 1 or len(names) != num_readers:
            raise SharedMemoryError(f"broadcast ring {name}: {num_readers} readers with names {names}")
        capacity = ring_capacity(ring_bytes)
        data_offset = READERS_OFFSET + num_readers * READER_BYTES

        def initialise(buffer: memoryview) -> None:
            header = StructView("BroadcastHeader", buffer, BROADCAST_OFFSET)
            header.set_word("capacity_bytes", capacity)
            header.set_word("readers_offset", READERS_OFFSET)
            header.set_word("data_offset", data_offset)
            header.set_word("num_readers", num_readers)
            StructView("WriterLine", buffer, WRITER_OFFSET).set_text("owner", name)
            for index, reader_name in enumerate(names):
                StructView("ReaderLine", buffer, READERS_OFFSET + index * READER_BYTES).set_text("owner", reader_name)

        return cls(Segment.create(segment_name(run_id, KIND, name), data_offset + capacity, initialise), epoch=0)

    @classmethod
    def attach(cls, run_id: str, name: str, epoch: int) -> BroadcastWriter:
        """Attach the writer in its life `epoch`; it continues after the last published record."""
        return cls(Segment.attach(segment_name(run_id, KIND, name)), epoch)

    def try_send(self, payload: bytes) -> bool:
        """Send a record to every active reader. Return False if the slowest has left no room. Without active readers the record
        is dropped. SharedMemoryError if it is larger than `max_record_bytes`."""
        return self._writer.try_send(payload)

    def active_readers(self) -> list[int]:
        """Return the readers that get the next record, after admitting new ones. For the writer only."""
        return self._writer.active_readers()

    def evict(self, reader: int) -> None:
        """Stop waiting for a reader, which is dead or will be told. It may attach again. Any process may call this, before it
        starts the reader's next life."""
        _native.evict(self.segment.buffer, reader)

    @property
    def fill_bytes(self) -> int:
        """Bytes that the slowest active reader has not read yet. For the writer only."""
        return self._writer.fill_bytes

    @property
    def num_full_waits(self) -> int:
        return self._writer.num_full_waits

    def close(self) -> None:
        del self._writer
        self.segment.close()

    def unlink(self) -> None:
        self.segment.unlink()


class BroadcastReader:
    """One reader's end."""

    def __init__(self, segment: Segment, reader: int, epoch: int) -> None:
        self.segment = segment
        self.spin_ns = DEFAULT_SPIN_NS
        self._reader = _native.BroadcastReader(segment.buffer, reader, epoch)

    @classmethod
    def attach(cls, run_id: str, name: str, reader: int, epoch: int) -> BroadcastReader:
        """Ask to join at the tail, replacing an earlier life of this reader."""
        return cls(Segment.attach(segment_name(run_id, KIND, name)), reader, epoch)

    def receive(self, max_records: int = 256) -> list[bytes]:
        """Return the records received. SharedMemoryError if this reader was evicted or replaced, or the ring is corrupt."""
        return self._reader.receive(max_records)

    def wait(self, timeout_ns: int) -> bool:
        """Sleep until there is a record or an eviction, which `receive` reports (True), or until the timeout."""
        return wait_in_slices(self._reader, timeout_ns, self.spin_ns)

    def watch(self, memory: memoryview, offset: int, seen: int) -> None:
        """End waits also when the u64 at `offset` is not `seen`. The process that changes it rings this reader (`ring_reader`).
        `memory` must be the same in every call."""
        self._reader.watch(memory, offset, seen)

    @property
    def num_late_wakes(self) -> int:
        """Sleeps that timed out although a record was there: its sender died or was delayed between publishing and waking."""
        return self._reader.num_late_wakes

    @property
    def is_active(self) -> bool:
        """Whether the writer has admitted this reader and waits for it."""
        return self._reader.is_active

    def leave(self) -> None:
        """Free the place: the writer no longer waits for this reader."""
        self._reader.leave()

    def close(self) -> None:
        del self._reader
        self.segment.close()


class ReaderBells:
    """Doorbells of a ring's readers, to wake them for something other than its records (`BroadcastReader.watch`)."""

    def __init__(self, run_id: str, name: str, readers: Sequence[int]) -> None:
        self._segment = Segment.attach(segment_name(run_id, KIND, name))
        self._readers = tuple(readers)

    def ring(self) -> None:
        for reader in self._readers:
            _native.ring_reader(self._segment.buffer, reader)

    def close(self) -> None:
        self._segment.close()
