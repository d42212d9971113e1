"""The encoder arena: features are found only where exactly these were completed."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shm.encoder_arena import EncoderArena
from shm.layout import StructView, offset_of
from shm.segment import MemoryFile

HASH, OTHER = b"h" * 32, b"o" * 32
SHAPE = (40, 6, "float32")


@pytest.fixture
def memory() -> MemoryFile:
    return MemoryFile.create("encoder", EncoderArena.num_bytes_of(*SHAPE))


def test_features_outlive_the_rank_that_wrote_them(memory: MemoryFile) -> None:
    arena = EncoderArena(memory, *SHAPE)
    arena.begin(7)
    arena.rows[7:10] = np.arange(18).reshape(3, 6)
    arena.publish(7, HASH, 3, 2)
    successor = EncoderArena(MemoryFile.from_fd(os.dup(memory.fd), memory.num_bytes), *SHAPE)
    assert successor.is_valid(7, HASH, 3, 2)
    assert np.array_equal(successor.rows[7:10], np.arange(18, dtype=np.float32).reshape(3, 6))


@pytest.mark.parametrize(
    ("first", "unit", "rows", "version"), [(7, OTHER, 3, 2), (7, HASH, 4, 2), (7, HASH, 3, 1), (8, HASH, 3, 2)]
)
def test_other_features_are_not_valid(memory: MemoryFile, first: int, unit: bytes, rows: int, version: int) -> None:
    arena = EncoderArena(memory, *SHAPE)
    arena.publish(7, HASH, 3, 2)
    assert arena.is_valid(7, HASH, 3, 2)
    assert not arena.is_valid(first, unit, rows, version)


def test_unfinished_features_are_not_valid(memory: MemoryFile) -> None:
    arena = EncoderArena(memory, *SHAPE)
    assert not arena.is_valid(0, bytes(32), 0, 0)
    arena.publish(0, HASH, 1, 1)
    arena.begin(0)
    assert not arena.is_valid(0, HASH, 1, 1)


def test_line_is_marked_complete_after_its_features(memory: MemoryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death in between leaves a line that is not valid."""
    arena = EncoderArena(memory, *SHAPE)
    start = offset_of("EncoderLine", "unit_hash")
    written: list[tuple[str, bytes]] = []
    set_word = StructView.set_word

    def noted(view: StructView, name: str, value: int) -> None:
        written.append((name, bytes(memory.buffer[start : start + 32])))
        set_word(view, name, value)

    monkeypatch.setattr(StructView, "set_word", noted)
    arena.publish(0, HASH, 1, 1)
    assert written[-1] == ("magic", HASH)
    assert sorted(name for name, _ in written) == ["dtype", "magic", "num_rows", "version", "width"]


def test_rows_past_the_end_are_not_valid(memory: MemoryFile) -> None:
    arena = EncoderArena(memory, *SHAPE)
    arena.publish(39, HASH, 2, 1)
    assert not arena.is_valid(39, HASH, 2, 1)


def test_features_of_another_shape_are_not_valid(memory: MemoryFile) -> None:
    EncoderArena(memory, *SHAPE).publish(0, HASH, 1, 1)
    assert not EncoderArena(memory, 40, 5, "float32").is_valid(0, HASH, 1, 1)
    assert not EncoderArena(memory, 40, 6, "bfloat16").is_valid(0, HASH, 1, 1)


def test_rows_of_bfloat16_are_half_as_large() -> None:
    small = MemoryFile.create("encoder", EncoderArena.num_bytes_of(40, 6, "bfloat16"))
    arena = EncoderArena(small, 40, 6, "bfloat16")
    assert (arena.rows.dtype, arena.rows.shape) == (np.uint16, (40, 6))
    with pytest.raises(IndexError, match="row 40 is outside the encoder arena of 40 rows"):
        arena.begin(40)
