"""The slab with one producer that holds all payloads: they do not overlap, readers copy them, and no reader gets another
payload.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.errors import SharedMemoryError
from shm.extent_slab import GRANULE_BYTES, ExtentSlab, SlabProducer
from shm.segment import MemoryFile
from shm.slab import SlabHandle

CAPACITY = 8 * GRANULE_BYTES


def new_slab(slab_id: int = 3) -> MemoryFile:
    memory = MemoryFile.create("slab", ExtentSlab.num_bytes_of(CAPACITY))
    ExtentSlab.lay_out(memory, "0123abcd", slab_id, CAPACITY)
    return memory


def again(memory: MemoryFile) -> MemoryFile:
    return MemoryFile.from_fd(os.dup(memory.fd), memory.num_bytes)


def put(producer: SlabProducer, payload: bytes) -> SlabHandle:
    handle = producer.put(payload)
    assert handle is not None
    return handle


def test_readers_of_any_life_copy_held_payloads() -> None:
    memory = new_slab()
    producer = SlabProducer(memory)
    handle = put(producer, b"x" * (GRANULE_BYTES + 1))
    assert producer.num_used_bytes == 2 * GRANULE_BYTES
    for _ in range(2):
        reader = ExtentSlab(again(memory))
        assert reader.read(handle) == b"x" * (GRANULE_BYTES + 1)
        reader.close()
    assert ExtentSlab(again(memory)).read(put(producer, b"")) == b""


def test_released_payload_is_refused_and_its_room_reused() -> None:
    memory = new_slab()
    producer, reader = SlabProducer(memory), ExtentSlab(again(memory))
    handles = [put(producer, bytes([number]) * GRANULE_BYTES) for number in range(8)]
    assert producer.put(b"more") is None
    producer.release(handles[2])
    producer.release(handles[3])
    assert producer.allocate(3 * GRANULE_BYTES) is None  # no three that are neighbours
    producer.release(handles[4])
    new = put(producer, b"n" * 3 * GRANULE_BYTES)
    assert (new.slot, reader.read(new)) == (2, b"n" * 3 * GRANULE_BYTES)
    for old in handles[2:5]:
        with pytest.raises(SharedMemoryError, match="its producer released it or died"):
            reader.read(old)
        producer.release(old)  # a second time
    assert reader.read(new) == b"n" * 3 * GRANULE_BYTES
    with pytest.raises(SharedMemoryError, match="a handle of slab 4 was used with slab 3"):
        reader.read(SlabHandle(4, new.slot, new.generation, new.num_bytes))
    with pytest.raises(SharedMemoryError, match="has 8 granules, but the handle has granule 8"):
        reader.read(SlabHandle(3, 8, 1, 1))
    with pytest.raises(SharedMemoryError, match="its producer released it or died"):
        reader.read(SlabHandle(3, new.slot, new.generation, new.num_bytes - 1))
    producer.release(new)
    for generation in range(new.generation + 3):  # no payload lies there, whatever a handle says
        with pytest.raises(SharedMemoryError, match="its producer released it or died"):
            reader.read(SlabHandle(3, new.slot, generation, new.num_bytes))


def test_payload_changed_during_a_copy_is_an_error() -> None:
    """The producer releases the payload and writes another one there while a reader copies."""
    memory = new_slab()
    producer = SlabProducer(memory)
    handle = put(producer, b"first")

    class Reader(ExtentSlab):
        def _payload(self, handle: SlabHandle) -> memoryview:
            producer.release(handle)
            put(producer, b"other")
            return super()._payload(handle)

    with pytest.raises(SharedMemoryError, match="its producer released it or died"):
        Reader(again(memory)).read(handle)


def test_new_producer_begins_with_an_empty_slab() -> None:
    memory = new_slab()
    old = put(SlabProducer(memory), b"old")
    reader = ExtentSlab(again(memory))
    assert reader.read(old) == b"old"
    successor = SlabProducer(again(memory))
    assert successor.num_used_bytes == 0
    with pytest.raises(SharedMemoryError, match="its producer released it or died"):
        reader.read(old)
    new = put(successor, b"new")
    assert new.slot == old.slot
    assert reader.read(new) == b"new"
    with pytest.raises(SharedMemoryError, match="its producer released it or died"):
        reader.read(old)


def test_only_a_slab_can_be_attached() -> None:
    with pytest.raises(SharedMemoryError, match="is not a slab"):
        ExtentSlab(MemoryFile.create("arena", 8192))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * GRANULE_BYTES)), max_size=40))
def test_no_payload_is_overwritten_while_it_is_held(operations: list[tuple[bool, int]]) -> None:
    memory = new_slab()
    producer, reader = SlabProducer(memory), ExtentSlab(again(memory))
    held: list[tuple[SlabHandle, bytes]] = []
    for number, (is_put, argument) in enumerate(operations):
        if is_put:
            payload = bytes([number]) * argument
            handle = producer.put(payload)
            if handle is not None:
                held.append((handle, payload))
        elif held:
            producer.release(held.pop(argument % len(held))[0])
        for handle, payload in held:
            assert reader.read(handle) == payload
    for handle, _ in held:
        producer.release(handle)
    assert producer.num_used_bytes == 0
    assert producer.allocate(CAPACITY) is not None  # all that was free is one piece again
