"""The conformance suite of rings: mailbox and broadcast ring both pass all of it."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import layout
from shm.errors import SharedMemoryError
from tests.shm.links import BroadcastLink, Link, MailboxLink

KINDS = pytest.mark.parametrize("kind", [MailboxLink, BroadcastLink])
RECORD_HEADER_BYTES = layout.size_of("RecordHeader")
SECOND = 1_000_000_000


@pytest.fixture(params=[MailboxLink, BroadcastLink])
def link(request: pytest.FixtureRequest, run_id: str) -> Link:
    found: Link = request.param(run_id)
    return found


def test_records_arrive_complete_and_in_order(link: Link) -> None:
    payloads = [b"", b"a", bytes(range(256)), b"x" * 100]
    assert [link.writer.try_send(payload) for payload in payloads] == [True] * 4
    assert link.receive() == payloads
    assert link.receive() == []


def test_receive_takes_no_more_than_asked(link: Link) -> None:
    for index in range(5):
        link.writer.try_send(b"%d" % index)
    assert link.receive(2) == [b"0", b"1"]
    assert link.receive(0) == []
    assert link.receive(256) == [b"2", b"3", b"4"]


def test_any_contiguous_bytes_can_be_sent(link: Link) -> None:
    assert link.writer.try_send(memoryview(b"view"))  # type: ignore[arg-type]
    assert link.writer.try_send(bytearray(b"array"))
    with pytest.raises(TypeError):
        link.writer.try_send("text")  # type: ignore[arg-type]
    assert link.receive() == [b"view", b"array"]


def test_full_ring_refuses_until_there_is_room(link: Link) -> None:
    num_sent = 0
    while link.writer.try_send(b"x" * 100):
        num_sent += 1
    assert num_sent == 1024 // 128
    assert link.writer.num_full_waits == 1
    assert link.writer.fill_bytes == 1024
    assert not link.writer.try_send(b"")
    assert link.writer.num_full_waits == 2
    assert link.receive(1) == [b"x" * 100]
    assert link.writer.try_send(b"y" * 100)
    assert link.receive() == [b"x" * 100] * 7 + [b"y" * 100]
    assert link.writer.fill_bytes == 0


def test_record_of_every_size_fits_from_every_position(link: Link) -> None:
    largest = link.writer.max_record_bytes
    assert largest == 1024 // 2 - RECORD_HEADER_BYTES
    for size in [*range(largest - 20, largest + 1), *range(40)]:
        for _ in range(1024 // 8 // 16):  # an odd number of words further each time
            payload = bytes([size % 256]) * size
            assert link.writer.try_send(payload)
            assert link.receive() == [payload]


def test_too_large_record_error_names_the_limit(link: Link) -> None:
    with pytest.raises(SharedMemoryError, match=r"record of 489 bytes does not fit.*up to 488 bytes; make the ring larger"):
        link.writer.try_send(b"x" * 489)
    assert link.writer.try_send(b"x" * 488)


def test_wait_returns_for_a_record_or_times_out(link: Link) -> None:
    assert not link.reader.wait(0)
    assert not link.reader.wait(1_000_000)
    link.writer.try_send(b"a")
    assert link.reader.wait(0)
    assert link.reader.wait(60 * SECOND)
    link.receive()
    assert not link.reader.wait(0)


@pytest.mark.parametrize("spin_ns", [0, 50_000])
def test_sleeping_reader_is_woken(link: Link, spin_ns: int) -> None:
    link.reader.spin_ns = spin_ns
    received: list[bytes] = []

    def read() -> None:
        while len(received) < 200:
            assert link.reader.wait(30 * SECOND)
            received.extend(link.receive())

    thread = threading.Thread(target=read)
    thread.start()
    for index in range(200):
        while not link.writer.try_send(b"%d" % index):
            time.sleep(0)
    thread.join(60)
    assert received == [b"%d" % index for index in range(200)]


def test_new_writer_continues_at_the_tail(link: Link) -> None:
    link.writer.try_send(b"old")
    link.open_writer(2)
    link.writer.try_send(b"new")
    assert link.receive() == [b"old", b"new"]
    _, writer, reader, _ = link.views()
    assert (writer.word("epoch"), writer.word("seq"), writer.word("num_records")) == (2, 1, 2)
    assert (reader.word("last_epoch"), reader.word("last_seq")) == (2, 1)


def test_reattached_writer_continues_its_count(link: Link) -> None:
    link.writer.try_send(b"1")
    link.open_writer(1)
    link.writer.try_send(b"2")
    assert link.receive() == [b"1", b"2"]


def test_unpublished_bytes_of_a_dead_writer_are_ignored(link: Link) -> None:
    buffer, writer, _, data = link.views()
    link.writer.try_send(b"whole")
    tail = writer.word("tail")
    buffer[data + tail : data + tail + 100] = b"\xff" * 100
    assert link.receive() == [b"whole"]
    link.open_writer(2)
    link.writer.try_send(b"next")
    assert link.receive() == [b"next"]


def test_record_of_an_older_writer_is_dropped(link: Link) -> None:
    link.open_writer(2)
    link.writer.try_send(b"new")
    assert link.receive() == [b"new"]
    link.open_writer(1)  # a writer that was taken for dead and comes back
    link.writer.try_send(b"stale")
    assert link.receive() == []
    assert link.views()[2].word("num_dropped") == 1


@pytest.mark.parametrize(
    ("field", "value"), [("num_bytes", 2**31), ("num_bytes", 1000), ("kind", 0), ("kind", 0x4441_5021)], ids=str
)
def test_corrupt_record_is_an_error(link: Link, field: str, value: int) -> None:
    buffer, _, _, data = link.views()
    link.writer.try_send(b"payload")
    layout.StructView("RecordHeader", buffer, data).set_word(field, value)
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match="corrupt ring: at position 0"):
            link.receive()


@pytest.mark.parametrize("tail", [1 << 40, 12])
def test_corrupt_tail_is_an_error(link: Link, tail: int) -> None:
    link.views()[1].set_word("tail", tail)
    with pytest.raises(SharedMemoryError, match=f"corrupt ring: reader position 0, writer position {tail}"):
        link.receive()


def test_corrupt_head_is_an_error_for_the_writer(link: Link) -> None:
    link.views()[2].set_word("head", 1 << 40)
    num_sent_unasked = 1024 // 128  # the writer asks for the head when it believes that the ring is full
    for _ in range(num_sent_unasked):
        link.writer.try_send(b"x" * 100)
    with pytest.raises(SharedMemoryError, match="corrupt ring: reader position"):
        link.writer.try_send(b"x" * 100)


@KINDS
@settings(max_examples=60)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 488)),
            st.tuples(st.just("receive"), st.integers(1, 8)),
            st.tuples(st.just("new writer"), st.just(0)),
            st.tuples(st.just("new reader"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_ring_is_a_queue(kind: type[Link], operations: list[tuple[str, int]]) -> None:
    """Compared with a deque: accepted records come out once, complete and in order, across lives of both ends."""
    link = kind()
    model: deque[bytes] = deque()
    writer_epoch = reader_epoch = 1
    try:
        for number, (operation, argument) in enumerate(operations):
            if operation == "send":
                payload = number.to_bytes(4, "little") * (argument // 4) + b"." * (argument % 4)
                span = -(-(RECORD_HEADER_BYTES + len(payload)) // 8) * 8
                fill = link.writer.fill_bytes
                if link.writer.try_send(payload):
                    model.append(payload)
                else:
                    assert fill + 2 * span > 1024  # room for the record, and at worst as much for a PAD
            elif operation == "receive":
                assert link.receive(argument) == [model.popleft() for _ in range(min(argument, len(model)))]
            elif operation == "new writer":
                writer_epoch += 1
                link.open_writer(writer_epoch)
            else:
                reader_epoch += 1
                link.open_reader(reader_epoch)
                if not link.continues_after_reader:
                    model.clear()
        assert link.receive(1000) == list(model)
    finally:
        link.unlink()
