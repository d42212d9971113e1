"""Notes in shared memory that outlive an actor: which work was in progress when it died.

The media process notes each file before decoding it and closes the note afterwards. If a file kills the process, the supervisor
finds the note open and counts the death for that file, not for the process; the next life reads this count.

    0               HEADER_BYTES                        + 64              + 128
    +---------------+-----------------------------------+-----------------+--- ...
    | SegmentHeader | u64 count | key (32) | zero to 64 | count, key, -   |         NUM_NOTES + 1 notes
    +---------------+-----------------------------------+-----------------+--- ...

Note 0 is the open one; its count is 1 while it is open. The others count deaths by key; count 0: unused. The process writes
while it lives, the supervisor after its death.
"""

from __future__ import annotations

from shm import _native
from shm.segment import HEADER_BYTES, Segment, segment_name

KIND = "notes"
KEY_BYTES = 32
NUM_NOTES = 127
_NOTE_BYTES = 64
_KEY_OFFSET = 8


class DeathNotes:
    """Notes of one process: created by the supervisor, attached by each of its lives."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._next = 0  # the note to replace next if all are used

    @classmethod
    def create(cls, run_id: str, name: str) -> DeathNotes:
        return cls(Segment.create(segment_name(run_id, KIND, name), HEADER_BYTES + (NUM_NOTES + 1) * _NOTE_BYTES))

    @classmethod
    def attach(cls, run_id: str, name: str) -> DeathNotes:
        return cls(Segment.attach(segment_name(run_id, KIND, name)))

    @property
    def open_key(self) -> bytes:
        """Key of the open note; empty: none."""
        # SYNC: the load-acquire pairs with the store-release of the count in `open`.
        return self._key(0) if self._count(0) else b""

    def open(self, key: bytes) -> None:
        """Note the work that starts now."""
        self._write(0, key, 1)

    def close_note(self) -> None:
        """Close the note: the process survived the work."""
        self._set_count(0, 0)

    def count_death(self) -> bytes:
        """Count a death for the key of the open note after the end of a life. Return the key; empty: no note was open."""
        key = self.open_key
        if key:
            note = self._find(key) or self._free_note()
            self._write(note, key, self.num_deaths(key) + 1)
            self.close_note()
        return key

    def num_deaths(self, key: bytes) -> int:
        note = self._find(key)
        return self._count(note) if note else 0

    def forget(self, key: bytes) -> None:
        """Subtract a death that another key caused."""
        if note := self._find(key):
            self._set_count(note, 0)

    def close(self) -> None:
        self.segment.close()

    def _find(self, key: bytes) -> int:
        """Return the note of a key with deaths; 0: none."""
        return next((note for note in range(1, NUM_NOTES + 1) if self._count(note) and self._key(note) == key), 0)

    def _free_note(self) -> int:
        free = next((note for note in range(1, NUM_NOTES + 1) if not self._count(note)), 0)
        if not free:
            free, self._next = 1 + self._next, (self._next + 1) % NUM_NOTES
        return free

    def _offset(self, note: int) -> int:
        return HEADER_BYTES + note * _NOTE_BYTES

    def _count(self, note: int) -> int:
        return _native.load_u64(self.segment.buffer, self._offset(note))

    def _set_count(self, note: int, count: int) -> None:
        _native.store_u64(self.segment.buffer, self._offset(note), count)

    def _key(self, note: int) -> bytes:
        start = self._offset(note) + _KEY_OFFSET
        return bytes(self.segment.buffer[start : start + KEY_BYTES])

    def _write(self, note: int, key: bytes, count: int) -> None:
        start = self._offset(note) + _KEY_OFFSET
        self._set_count(note, 0)
        self.segment.buffer[start : start + KEY_BYTES] = key
        self._set_count(note, count)
