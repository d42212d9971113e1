"""The tensor slab: large arrays that actors pass on without a copy by the reader.

One producer allocates slots from a memfd that the supervisor created and passed on; a small `SlabHandle` is sent in a message;
each consumer maps the same memfd and reads the payload in place. A slot has a mask with a bit for every consumer that has not
released it yet and one for its producer, so that the bits of a dead process can be cleared. A slot is free when no bit is set.

The producer's bit is set by `allocate` and cleared by `release` once the handle is sent. If the producer dies in between,
`clear_consumer(PRODUCER)`, called when its next life attaches, frees the slot for all, because it is unknown whether the handle
was sent; such a handle is then refused as stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from shm import _native
from shm.errors import SharedMemoryError
from shm.layout import LINE, MAGIC, StructView, round_up, size_of
from shm.segment import MemoryFile, check_header, publish, write_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

PRODUCER = _native.PRODUCER_BIT
SLAB_OFFSET = size_of("SegmentHeader")
CLASSES_OFFSET = SLAB_OFFSET + 16
SLOTS_OFFSET = SLAB_OFFSET + size_of("SlabHeader")
PAGE_BYTES = 4096


class SlabHandle(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Handle of a payload, sent in messages. It is stale once every consumer has released the slot."""

    slab: int
    slot: int
    generation: int
    num_bytes: int


class Slab:
    """A slab, mapped by one process; `holder` is the bit with which this process holds slots."""

    def __init__(self, memory: MemoryFile, holder: int) -> None:
        check_bit(holder)
        self.memory = memory
        self.holder = holder
        self.slab_id = StructView("SlabHeader", memory.buffer, SLAB_OFFSET).word("slab_id")
        self._native = _native.Slab(memory.buffer)

    @staticmethod
    def num_bytes_of(slots: Mapping[int, int]) -> int:
        """Return the size of the memory file for {slot bytes: number of slots}."""
        return _class_offsets(slots)[1]

    @classmethod
    def create(cls, memory: MemoryFile, run_id: str, slab_id: int, slots: Mapping[int, int]) -> Slab:
        """Create a slab in a new memory file of `num_bytes_of(slots)`. Called by the supervisor before any process attaches."""
        offsets, num_bytes = _class_offsets(slots)
        if memory.num_bytes < num_bytes:
            raise SharedMemoryError(f"slab {slab_id} needs {num_bytes} bytes, but its memory file has {memory.num_bytes}")
        header = StructView("SlabHeader", memory.buffer, SLAB_OFFSET)
        header.set_word("slab_id", slab_id)
        header.set_word("num_classes", len(slots))
        header.set_word("num_slots", sum(slots.values()))
        first_slot = 0
        for index, ((slot_bytes, num_slots), data_offset) in enumerate(zip(sorted(slots.items()), offsets, strict=True)):
            size_class = StructView("SlabClass", memory.buffer, CLASSES_OFFSET + index * size_of("SlabClass"))
            size_class.set_word("slot_bytes", round_up(slot_bytes, LINE))
            size_class.set_word("first_slot", first_slot)
            size_class.set_word("num_slots", num_slots)
            size_class.set_word("data_offset", data_offset)
            first_slot += num_slots
        segment = StructView("SegmentHeader", memory.buffer)
        write_header(segment, run_id, "slab", f"slab{slab_id}", memory.num_bytes, epoch=0)
        publish(segment)
        return cls(memory, PRODUCER)

    @classmethod
    def attach(cls, memory: MemoryFile, holder: int) -> Slab:
        """Attach to an inherited memory file as consumer `holder` (0 to 62) or as `PRODUCER`, which frees slots whose handles
        its last life had not sent. (The supervisor clears slots of a dead consumer, because its next life may have been sent
        handles already.)"""
        header = StructView("SegmentHeader", memory.buffer)
        # SYNC: the load-acquire pairs with the store-release in publish.
        if header.word("magic") != MAGIC:
            raise SharedMemoryError(f"the memory file on descriptor {memory.fd} is not a slab")
        check_header(header, f"slab {header.text('name')}", memory.num_bytes)
        slab = cls(memory, holder)
        if holder == PRODUCER:
            slab.clear_consumer(PRODUCER)
        return slab

    def allocate(self, num_bytes: int, consumers: Iterable[int]) -> SlabHandle | None:
        """Allocate a slot of at least `num_bytes` for these consumers; the producer holds it too until it calls `release`. None
        if no free slot is large enough. Only the producer may call this."""
        mask = 0
        for consumer in consumers:
            mask |= 1 << check_bit(consumer)
        found = self._native.allocate(num_bytes, mask)
        return None if found is None else SlabHandle(self.slab_id, found[0], found[1], num_bytes)

    def put(self, payload: Buffer, consumers: Iterable[int]) -> SlabHandle | None:
        """Allocate, and copy a payload in."""
        source = memoryview(payload).cast("B")
        handle = self.allocate(source.nbytes, consumers)
        if handle is not None:
            self.writable(handle)[:] = source
        return handle

    def writable(self, handle: SlabHandle) -> memoryview:
        """Return the payload's memory, for the producer to fill before it sends the handle."""
        return self._payload(handle)

    def view(self, handle: SlabHandle) -> memoryview:
        """Return the payload in place, read-only, valid until this process calls `release`. SharedMemoryError if the handle is
        stale or not for this consumer."""
        return self._payload(handle).toreadonly()

    def release(self, handle: SlabHandle) -> None:
        """Release the slot for this process. The last release frees it."""
        self._native.release(handle.slot, handle.generation, self.holder)

    def clear_consumer(self, holder: int) -> int:
        """Release all slots of a dead consumer (or `PRODUCER`) and return their number."""
        return self._native.clear(check_bit(holder))

    @property
    def num_used(self) -> int:
        """Number of held slots."""
        return self._native.num_used

    def close(self) -> None:
        del self._native
        self.memory.close()

    def _payload(self, handle: SlabHandle) -> memoryview:
        if handle.slab != self.slab_id:
            raise SharedMemoryError(f"a handle of slab {handle.slab} was used with slab {self.slab_id}")
        offset = self._native.offset(handle.slot, handle.generation, handle.num_bytes, self.holder)
        return self.memory.buffer[offset : offset + handle.num_bytes]


def check_bit(holder: int) -> int:
    """Check a bit of the mask: consumers have 0 to 62, the producer 63."""
    if not 0 <= holder <= PRODUCER:
        raise SharedMemoryError(f"consumer {holder} is outside 0 to {PRODUCER - 1}, the bits of the mask")
    return holder


def _class_offsets(slots: Mapping[int, int]) -> tuple[list[int], int]:
    """Return the offset of each size class, in ascending order of size, and the end of the last one."""
    if not 1 <= len(slots) <= _native.MAX_SLAB_CLASSES or min(min(slots), min(slots.values())) < 1:
        raise SharedMemoryError(
            f"a slab must have 1 to {_native.MAX_SLAB_CLASSES} size classes of positive size, not {dict(slots)}"
        )
    end = SLOTS_OFFSET + sum(slots.values()) * size_of("SlotLine")
    offsets = []
    for slot_bytes, num_slots in sorted(slots.items()):
        offsets.append(round_up(end, PAGE_BYTES))
        end = offsets[-1] + round_up(slot_bytes, LINE) * num_slots
    return offsets, end
