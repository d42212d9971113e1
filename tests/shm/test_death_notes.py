"""Death notes: the next life and the supervisor know which file a process was decoding when it died."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from shm.death_notes import NUM_NOTES, DeathNotes
from shm.segment import unlink_segment

KEY = b"k" * 32


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = secrets.token_hex(4)
    notes = DeathNotes.create(run_id, "media0")
    yield run_id
    unlink_segment(notes.segment.name)


def test_death_with_open_note_counts_for_its_key(run_id: str) -> None:
    for num_deaths in (1, 2):
        life = DeathNotes.attach(run_id, "media0")
        life.open(KEY)
        assert DeathNotes.attach(run_id, "media0").open_key == KEY  # as the supervisor sees it
        successor = DeathNotes.attach(run_id, "media0")
        assert successor.count_death() == KEY
        assert (successor.num_deaths(KEY), successor.open_key) == (num_deaths, b"")
    successor.forget(KEY)
    assert successor.num_deaths(KEY) == 0


def test_death_without_a_note_counts_for_no_key(run_id: str) -> None:
    life = DeathNotes.attach(run_id, "media0")
    life.open(KEY)
    life.close_note()
    successor = DeathNotes.attach(run_id, "media0")
    assert (successor.count_death(), successor.num_deaths(KEY)) == (b"", 0)


def test_oldest_note_is_replaced(run_id: str) -> None:
    life = DeathNotes.attach(run_id, "media0")
    keys = [number.to_bytes(32, "big") for number in range(NUM_NOTES + 3)]
    for key in keys:
        life.open(key)
        life.count_death()
    assert [life.num_deaths(key) for key in keys] == 3 * [0] + NUM_NOTES * [1]


def test_death_while_writing_counts_for_no_other_key(run_id: str) -> None:
    """The count is reset before the key changes and set after it."""
    written: list[tuple[int, bytes]] = []

    class Notes(DeathNotes):
        def _set_count(self, note: int, count: int) -> None:
            written.append((count, self._key(note)))
            super()._set_count(note, count)

    life = Notes.attach(run_id, "media0")
    life.open(KEY)
    life.open(b"o" * 32)
    assert written == [(0, bytes(32)), (1, KEY), (0, KEY), (1, b"o" * 32)]
