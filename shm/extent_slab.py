"""A slab of payloads of any size. Its single producer holds them; readers copy.

Used for fetched pictures (the api's media slab) and pixels (the media process's pixel slab). The layout is that of
`shm/slab.py` with a single size class: data in granules, each with a SlotLine. A payload takes consecutive granules; the line
of the first one has its size and a generation, which changes when the producer releases it. A reader copies first and then
checks that the generation is still that of its handle, so readers never block the producer and need no clean-up when they die.
Payloads end with their producer: its next life begins with an empty slab.

    0               256          512                      CLASS data_offset (page)
    +---------------+------------+--- ... ---+------------+------------+------------+ ...
    | SegmentHeader | SlabHeader | SlotLine 0 .. n-1      | granule 0  | granule 1  |
    +---------------+------------+--- ... ---+------------+------------+------------+ ...
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from shm import _native
from shm.errors import SharedMemoryError
from shm.layout import MAGIC, StructView, size_of
from shm.segment import MemoryFile, check_header
from shm.slab import PRODUCER, SLAB_OFFSET, SLOTS_OFFSET, Slab, SlabHandle

if TYPE_CHECKING:
    from typing_extensions import Buffer

GRANULE_BYTES = 16 << 10
_LINE_BYTES = size_of("SlotLine")
_HELD = 1 << PRODUCER


class ExtentSlab:
    """The reader's side of a slab."""

    def __init__(self, memory: MemoryFile) -> None:
        """Attach to a slab. SharedMemoryError if the memory file holds none."""
        header = StructView("SegmentHeader", memory.buffer)
        # SYNC: the load-acquire pairs with the store-release in publish.
        if header.word("magic") != MAGIC:
            raise SharedMemoryError(f"the memory file on descriptor {memory.fd} is not a slab")
        check_header(header, f"slab {header.text('name')}", memory.num_bytes)
        slab = StructView("SlabHeader", memory.buffer, SLAB_OFFSET)
        self.memory = memory
        self.slab_id = slab.word("slab_id")
        self.num_granules = slab.word("num_slots")
        self._data_offset = memory.num_bytes - self.num_granules * GRANULE_BYTES
        self._lines = StructView("SlotLine", memory.buffer)

    @staticmethod
    def num_bytes_of(capacity_bytes: int) -> int:
        """Return the size of the memory file of a slab for `capacity_bytes` of payloads."""
        return Slab.num_bytes_of(_classes_of(capacity_bytes))

    @staticmethod
    def lay_out(memory: MemoryFile, run_id: str, slab_id: int, capacity_bytes: int) -> None:
        """Create a slab in a new memory file of `num_bytes_of(capacity_bytes)`. Called by the supervisor before any process
        attaches."""
        Slab.create(memory, run_id, slab_id, _classes_of(capacity_bytes))

    @property
    def capacity_bytes(self) -> int:
        return self.num_granules * GRANULE_BYTES

    def read(self, handle: SlabHandle) -> bytearray:
        """Return a copy of a payload. SharedMemoryError if its producer has released it or died."""
        copy = bytearray(handle.num_bytes)
        self.read_into(handle, copy)
        return copy

    def read_into(self, handle: SlabHandle, target: Buffer) -> None:
        """Copy a payload into `target`, which has its size. After an error its contents are undefined."""
        self.check(handle)
        memoryview(target).cast("B")[:] = self._payload(handle)
        # SYNC: pairs with the fence in SlabProducer._drop: if a byte belonged to a later payload, the generation has changed.
        _native.fence()
        self.check(handle)

    def close(self) -> None:
        self.memory.close()

    def _payload(self, handle: SlabHandle) -> memoryview:
        offset = self._data_offset + handle.slot * GRANULE_BYTES
        return self.memory.buffer[offset : offset + handle.num_bytes]

    def _line(self, granule: int) -> StructView:
        self._lines.offset = SLOTS_OFFSET + granule * _LINE_BYTES
        return self._lines

    def check(self, handle: SlabHandle) -> None:
        """Raise SharedMemoryError if the handle names no payload, or a released one."""
        if handle.slab != self.slab_id:
            raise SharedMemoryError(f"a handle of slab {handle.slab} was used with slab {self.slab_id}")
        if not 0 <= handle.slot < self.num_granules:
            raise SharedMemoryError(
                f"slab {self.slab_id} has {self.num_granules} granules, but the handle has granule {handle.slot}"
            )
        line = self._line(handle.slot)
        found = (line.word("mask") == _HELD, line.word("generation"), line.word("num_bytes"))
        if found != (True, handle.generation, handle.num_bytes):
            raise SharedMemoryError(
                f"granule {handle.slot} of slab {self.slab_id} is at generation {found[1]} with {found[2]} bytes, but the "
                f"handle has {handle.generation} and {handle.num_bytes}: its producer released it or died"
            )


class SlabProducer(ExtentSlab):
    """The producer's side of a slab; only it knows what is free. Each life begins with an empty slab."""

    def __init__(self, memory: MemoryFile) -> None:
        super().__init__(memory)
        for granule in range(self.num_granules):
            line = self._line(granule)
            if line.word("mask"):
                self._drop(granule)
        self._free: list[tuple[int, int]] = [(0, self.num_granules)]  # (first granule, number), ascending, never adjacent
        self._held: dict[int, int] = {}  # first granule -> generation
        self.num_used_bytes = 0  # whole granules

    def allocate(self, num_bytes: int) -> SlabHandle | None:
        """Allocate room for a payload until `release`. None if there is none now."""
        wanted = max(1, -(-num_bytes // GRANULE_BYTES))
        index = next((index for index, (_, count) in enumerate(self._free) if count >= wanted), None)
        if index is None:
            return None
        first, count = self._free[index]
        self._free[index : index + 1] = [(first + wanted, count - wanted)] if count > wanted else []
        line = self._line(first)
        generation = line.word("generation") + 1
        line.set_word("generation", generation)
        line.set_word("num_bytes", num_bytes)
        line.set_word("mask", _HELD)
        self._held[first] = generation
        self.num_used_bytes += wanted * GRANULE_BYTES
        return SlabHandle(self.slab_id, first, generation, num_bytes)

    def put(self, payload: Buffer) -> SlabHandle | None:
        """Allocate, and copy a payload in."""
        source = memoryview(payload).cast("B")
        handle = self.allocate(source.nbytes)
        if handle is not None:
            self._payload(handle)[:] = source
        return handle

    def writable(self, handle: SlabHandle) -> memoryview:
        """Return the payload's memory, to be filled before the handle is sent."""
        self.check(handle)
        return self._payload(handle)

    def release(self, handle: SlabHandle) -> None:
        """Release a payload; its handle is refused from now on. May be called again."""
        if self._held.get(handle.slot) != handle.generation:
            return
        del self._held[handle.slot]
        self._drop(handle.slot)
        first, count = handle.slot, max(1, -(-handle.num_bytes // GRANULE_BYTES))
        self.num_used_bytes -= count * GRANULE_BYTES
        index = bisect_left(self._free, (first, 0))
        if index < len(self._free) and self._free[index][0] == first + count:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            first, before = self._free.pop(index := index - 1)
            count += before
        self._free.insert(index, (first, count))

    def _drop(self, granule: int) -> None:
        line = self._line(granule)
        line.set_word("generation", line.word("generation") + 1)
        line.set_word("mask", 0)
        # SYNC: pairs with the fence in ExtentSlab.read_into: later payloads are written after this.
        _native.fence()


def _classes_of(capacity_bytes: int) -> dict[int, int]:
    return {GRANULE_BYTES: max(1, -(-capacity_bytes // GRANULE_BYTES))}
