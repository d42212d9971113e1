"""Records that wait for room in a ring: none is lost, none overtakes another, and the sender tries again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import BlocksCleared, Hello, decode
from engine.process.outbox import BackloggedOutbox, earliest


class Ring:
    """Ring that takes as many records as it has room for."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.room = 0

    def try_send(self, record: bytes) -> bool:
        if self.room:
            self.room -= 1
            self.records.append(record)
            return True
        return False


@given(st.lists(st.integers(0, 4), max_size=30))
def test_records_arrive_in_order(rooms: list[int]) -> None:
    ring = Ring()
    outbox = BackloggedOutbox(ring.try_send)
    posted: list[bytes] = []
    for number, ring.room in enumerate(rooms):
        records = [bytes([2 * number]), bytes([2 * number + 1])]
        outbox.post_records(records)
        posted += records
        num_before = len(ring.records)
        assert outbox.flush() == len(ring.records) - num_before
        assert len(ring.records) + len(outbox) == len(posted)
        assert ring.room == 0 or not len(outbox)
        assert (outbox.deadline_ns() > 0) == (len(outbox) > 0)
    assert ring.records == posted[: len(ring.records)]


def test_cleared_messages_are_not_sent() -> None:
    ring = Ring()
    outbox = BackloggedOutbox(ring.try_send)
    outbox.post(BlocksCleared())
    outbox.clear()
    outbox.post(Hello("cache", 3), BlocksCleared())
    ring.room = 9
    assert outbox.flush() == 2
    assert [decode(record) for record in ring.records] == [Hello("cache", 3), BlocksCleared()]


def test_no_deadline_is_no_early_one() -> None:
    assert (earliest(), earliest(0, 0), earliest(0, 7, 5)) == (0, 0, 5)
