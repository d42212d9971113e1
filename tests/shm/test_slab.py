"""The tensor slab: payloads in place, and no death loses a slot."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.errors import SharedMemoryError
from shm.segment import MemoryFile
from shm.slab import PRODUCER, Slab, SlabHandle

SLOTS = {1000: 3, 100_000: 2}
RUN_ID = "0123abcd"


@pytest.fixture
def memory() -> Iterator[MemoryFile]:
    memory = MemoryFile.create("slab", Slab.num_bytes_of(SLOTS))
    yield memory
    memory.close()


@pytest.fixture
def producer(memory: MemoryFile) -> Slab:
    return Slab.create(memory, RUN_ID, 5, SLOTS)


def consumer(memory: MemoryFile, bit: int) -> Slab:
    return Slab.attach(MemoryFile.from_fd(os.dup(memory.fd), memory.num_bytes), bit)


def put(producer: Slab, payload: bytes, consumers: list[int]) -> SlabHandle:
    handle = producer.put(payload, consumers)
    assert handle is not None
    return handle


def test_consumers_see_the_payload_in_place(memory: MemoryFile, producer: Slab) -> None:
    handle = producer.allocate(4000, [0, 1])
    assert handle is not None
    array = np.frombuffer(producer.writable(handle), dtype=np.float32)
    array[:] = np.arange(1000)
    for bit in (0, 1):
        view = consumer(memory, bit).view(handle)
        assert view.readonly
        assert np.array_equal(np.frombuffer(view, dtype=np.float32), np.arange(1000, dtype=np.float32))


def test_handle_travels_in_a_message(producer: Slab) -> None:
    handle = put(producer, b"payload", [0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=SlabHandle) == handle


def test_slot_is_free_when_everybody_has_released_it(memory: MemoryFile, producer: Slab) -> None:
    first, second = consumer(memory, 0), consumer(memory, 7)
    handle = put(producer, b"payload", [0, 7])
    for holder in (producer, first, second):
        assert producer.num_used == 1
        holder.release(handle)
    assert producer.num_used == 0


def test_full_classes_overflow_upwards_and_then_refuse(producer: Slab) -> None:
    handles = [put(producer, b"x" * 10, [0]) for _ in range(5)]
    assert len({handle.slot for handle in handles}) == 5
    assert producer.put(b"x", [0]) is None
    producer.clear_consumer(0)
    producer.release(handles[2])
    assert put(producer, b"x", [0]).slot == handles[2].slot
    assert producer.allocate(100_001, [0]) is None


def test_stale_handle_is_refused(memory: MemoryFile, producer: Slab) -> None:
    reader = consumer(memory, 0)
    old = put(producer, b"x" * 50_000, [0])
    reader.release(old)
    producer.release(old)
    with pytest.raises(SharedMemoryError, match=f"slab 5: slot {old.slot}, generation 1, is not held by consumer 0"):
        reader.view(old)
    for _ in range(2):  # round to the same slot
        new = put(producer, b"y" * 50_000, [0])
    assert new.slot == old.slot
    for use in (reader.view, reader.release):
        with pytest.raises(SharedMemoryError, match="is at generation 2, the handle's is 1"):
            use(old)
    assert bytes(reader.view(new)) == b"y" * 50_000


def test_handle_for_others_or_made_up_is_refused(memory: MemoryFile, producer: Slab) -> None:
    reader = consumer(memory, 1)
    handle = put(producer, b"payload", [0])
    with pytest.raises(SharedMemoryError, match="is not held by consumer 1"):
        reader.view(handle)
    with pytest.raises(SharedMemoryError, match="a handle of slab 6 was used with slab 5"):
        reader.view(msgspec.structs.replace(handle, slab=6))
    with pytest.raises(SharedMemoryError, match="slot 99 does not exist, there are 5"):
        reader.view(msgspec.structs.replace(handle, slot=99))
    with pytest.raises(SharedMemoryError, match="holds 7 bytes, the handle says 1000000"):
        consumer(memory, 0).view(msgspec.structs.replace(handle, num_bytes=1_000_000))
    with pytest.raises(SharedMemoryError, match="consumer 64 is outside 0 to 62"):
        producer.allocate(1, [64])


def test_bit_of_a_dead_consumer_is_cleared_everywhere(memory: MemoryFile, producer: Slab) -> None:
    reader = consumer(memory, 1)
    handles = [put(producer, b"x", [0, 1]) for _ in range(3)]
    for handle in handles:
        producer.release(handle)
        reader.release(handle)
    assert producer.num_used == 3
    assert producer.clear_consumer(0) == 3
    assert producer.num_used == 0


def test_slot_of_a_producer_that_died_is_freed(memory: MemoryFile, producer: Slab) -> None:
    reader = consumer(memory, 0)
    sent, unsent = put(producer, b"sent", [0]), put(producer, b"unsent", [0])
    producer.release(sent)
    successor = consumer(memory, PRODUCER)
    assert successor.num_used == 1
    assert bytes(reader.view(sent)) == b"sent"
    with pytest.raises(SharedMemoryError, match="it was released or its producer died"):
        reader.view(unsent)


def test_only_a_slab_can_be_attached() -> None:
    memory = MemoryFile.create("arena", 8192)
    with pytest.raises(SharedMemoryError, match="is not a slab"):
        Slab.attach(memory, 0)
    with pytest.raises(SharedMemoryError, match=r"slab 0 needs \d+ bytes, but its memory file has 8192"):
        Slab.create(memory, RUN_ID, 0, SLOTS)
    with pytest.raises(SharedMemoryError, match="1 to 8 size classes of positive size"):
        Slab.num_bytes_of({100: 0})
    memory.close()


@settings(max_examples=50)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 100_000), st.sets(st.integers(0, 2))),
            st.tuples(st.just("release"), st.integers(0, 100), st.just(set())),
            st.tuples(st.just("die"), st.integers(0, 2), st.just(set())),
        ),
        max_size=40,
    )
)
def test_no_payload_is_overwritten_while_it_is_held(operations: list[tuple[str, int, set[int]]]) -> None:
    memory = MemoryFile.create("slab", Slab.num_bytes_of(SLOTS))
    producer = Slab.create(memory, RUN_ID, 5, SLOTS)
    consumers = [consumer(memory, bit) for bit in range(3)]
    held: list[tuple[SlabHandle, int, bytes]] = []  # (handle, holder, payload)
    for number, (operation, argument, bits) in enumerate(operations):
        if operation == "put":
            payload = bytes([number]) * argument
            handle = producer.put(payload, bits)
            if handle is None:
                room = [slot_bytes for slot_bytes, num_slots in SLOTS.items() if slot_bytes >= argument]
                assert len({held_handle.slot for held_handle, _, _ in held}) >= min(2, len(room))
                continue
            producer.release(handle)
            held += [(handle, bit, payload) for bit in bits]
        elif operation == "release" and held:
            handle, bit, _ = held.pop(argument % len(held))
            consumers[bit].release(handle)
        elif operation == "die":
            producer.clear_consumer(argument)
            consumers[argument].close()
            consumers[argument] = consumer(memory, argument)
            held = [entry for entry in held if entry[1] != argument]
        for handle, bit, payload in held:
            assert consumers[bit].view(handle) == payload
    assert producer.num_used == len({handle.slot for handle, _, _ in held})
    for slab in (producer, *consumers):
        slab.close()
