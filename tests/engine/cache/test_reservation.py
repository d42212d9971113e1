"""The arena's memory is reserved before it is written, and a shortage is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from engine.cache.reservation import MARGIN_BYTES, SLICE_BYTES, ArenaReservation
from shm.counters import Cell
from shm.memory import available_memory_bytes
from shm.segment import MemoryFile
from tests.waiting import wait_until

NUM_BYTES = 2 * SLICE_BYTES + 12345


class Bench:
    def __init__(self) -> None:
        self.arena = MemoryFile.create("tokamak-test", NUM_BYTES)
        self.reserved = Cell(memoryview(bytearray(8)), 0)
        self.said: list[str] = []
        self.available = 1 << 40
        self.reservation = ArenaReservation(self.arena, self.reserved, self.said.append, lambda: self.available)

    def advance_until(self, num_bytes: int) -> None:
        def is_reached() -> bool:
            self.reservation.advance()
            return int(self.reserved.value) == num_bytes

        wait_until(is_reached, what=f"{num_bytes} bytes are reserved")

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.arena.fd).st_blocks * 512


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.arena.close()


def test_all_of_it_slice_by_slice(bench: Bench) -> None:
    written = np.frombuffer(bench.arena.buffer, np.uint8)
    written[100:200] = 7
    assert bench.allocated_bytes < SLICE_BYTES
    bench.advance_until(SLICE_BYTES)
    assert SLICE_BYTES <= bench.allocated_bytes < NUM_BYTES
    bench.advance_until(NUM_BYTES)
    assert bench.allocated_bytes >= NUM_BYTES
    assert bench.reservation.is_done
    assert bench.said == []
    assert (written[100:200] == 7).all()
    assert int(written.sum()) == 700


def test_memory_shortage_is_logged_once(bench: Bench) -> None:
    bench.advance_until(SLICE_BYTES)
    bench.available = SLICE_BYTES + MARGIN_BYTES - 1
    wait_until(lambda: bench.reservation.advance() or bench.said, what="it is said")
    bench.reservation.advance()
    (text,) = bench.said
    assert "running out: 8 MiB of 16.01 MiB reserved, 264 MiB available" in text
    assert "--kv-cache-memory" in text
    bench.available = available_memory_bytes()
    bench.advance_until(NUM_BYTES)
    assert len(bench.said) == 1
