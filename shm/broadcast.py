"""The broadcast ring: one writer (the scheduler), a position for each reader (the ranks).

The supervisor creates it and evicts dead readers; the scheduler attaches the writer, each worker a reader. The writer waits for
the slowest active reader and for no other. A new reader joins at the tail: its first record is the first one after the writer
noticed it, which is before the writer's next send.
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
        """A ring of at least `ring_bytes` that `name` writes. Readers are called worker0, worker1, ... where not named."""
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
        """The writer in its incarnation `epoch`, which goes on after the last record that was published."""
        return cls(Segment.attach(segment_name(run_id, KIND, name)), epoch)

    def try_send(self, payload: bytes) -> bool:
        """Send a record to every active reader, or refuse (False) where the slowest has left no room. With no active reader it
        is dropped. SharedMemoryError: larger than `max_record_bytes`."""
        return self._writer.try_send(payload)

    def active_readers(self) -> list[int]:
        """Return the readers that get the next record. Asking admits new ones. For the writer only."""
        return self._writer.active_readers()

    def evict(self, reader: int) -> None:
        """No longer wait for a reader, which must be dead or must learn that it is out. It may attach again. Any process may
        call this, before it starts the reader's next incarnation."""
        _native.evict(self.segment.buffer, reader)

    @property
    def fill_bytes(self) -> int:
        """Bytes that the slowest active reader has yet to take. For the writer only."""
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
        """Ask to join at the tail, in place of an earlier incarnation of this reader."""
        return cls(Segment.attach(segment_name(run_id, KIND, name)), reader, epoch)

    def receive(self, max_records: int = 256) -> list[bytes]:
        """Return the records that came. SharedMemoryError: this reader was evicted or replaced, or the ring is corrupt."""
        return self._reader.receive(max_records)

    def wait(self, timeout_ns: int) -> bool:
        """Sleep until something is there (True; also an eviction, which `receive` then reports) or the time is over."""
        return wait_in_slices(self._reader, timeout_ns, self.spin_ns)

    def watch(self, memory: memoryview, offset: int, seen: int) -> None:
        """Waits end from now on also when the u64 at `offset` is not `seen`; who changes it rings this reader (`ring_reader`).
        The memory is that of the first call."""
        self._reader.watch(memory, offset, seen)

    @property
    def num_late_wakes(self) -> int:
        """Sleeps that ran out with a record there already: its sender died or was held up between publishing and waking."""
        return self._reader.num_late_wakes

    @property
    def is_active(self) -> bool:
        """The writer has admitted this reader and waits for it."""
        return self._reader.is_active

    def leave(self) -> None:
        """Free the place: the writer no longer waits for this reader."""
        self._reader.leave()

    def close(self) -> None:
        del self._reader
        self.segment.close()


class ReaderBells:
    """The bells of a ring's readers, for those who have something else for them than its records (`BroadcastReader.watch`)."""

    def __init__(self, run_id: str, name: str, readers: Sequence[int]) -> None:
        self._segment = Segment.attach(segment_name(run_id, KIND, name))
        self._readers = tuple(readers)

    def ring(self) -> None:
        for reader in self._readers:
            _native.ring_reader(self._segment.buffer, reader)

    def close(self) -> None:
        self._segment.close()
