"""A set of 8-byte fingerprints in shared memory, with one writer and lock-free readers.

Holds the contents of a replica's prefix cache, blocks and recurrent states: its cache actor writes, the tokenizers look up
where a prompt is cached.

    0                     HEADER_BYTES      + 8             + 8 * num_slots
    +---------------------+-----------------+----- ... -----+
    | SegmentHeader       | u64 slot 0      | u64 slot 1 .. |       0: empty
    +---------------------+-----------------+----- ... -----+

Open addressing with linear probing from the slot given by the fingerprint's low bits; the number of slots is a power of two. A
reader may miss a fingerprint that is being moved, or find one that is being removed: results are hints. The supervisor creates
the segment; each life of the writer begins with an empty set.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from shm import _native
from shm.segment import HEADER_BYTES, Segment, segment_name

KIND = "prefix"
_WORD_BYTES = 8
_MIN_SLOTS = 64


def num_slots_for(num_fingerprints: int, max_bytes: int) -> int:
    """Return the number of slots for `num_fingerprints` at a load of one half, limited by `max_bytes`."""
    wanted = max(_MIN_SLOTS, 1 << (2 * num_fingerprints - 1).bit_length())
    affordable = 1 << max(_MIN_SLOTS.bit_length(), (max_bytes // _WORD_BYTES).bit_length()) - 1
    return min(wanted, affordable)


def fingerprint_of(key: bytes) -> int:
    """Return the fingerprint of a block by its key, which is a hash. Never 0, which marks an empty slot."""
    return int.from_bytes(key[:_WORD_BYTES], "little") or 1


def state_fingerprint_of(key: bytes) -> int:
    """Return the fingerprint of the recurrent state after a block, by the block's key."""
    return fingerprint_of(key[_WORD_BYTES:])


class FingerprintSet:
    """A reader's end."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._mask = (segment.buffer.nbytes - HEADER_BYTES) // _WORD_BYTES - 1

    @classmethod
    def create(cls, run_id: str, name: str, num_slots: int) -> FingerprintSet:
        """Create an empty set; `num_slots` is a power of two."""
        return cls(Segment.create(segment_name(run_id, KIND, name), HEADER_BYTES + _WORD_BYTES * num_slots))

    @classmethod
    def attach(cls, run_id: str, name: str) -> FingerprintSet:
        return cls(Segment.attach(segment_name(run_id, KIND, name)))

    def __contains__(self, fingerprint: int) -> bool:
        return self._find(fingerprint) >= 0

    def find_all(self, fingerprints: Iterable[int]) -> bytes:
        """Return a byte for each fingerprint: 1 if it is there."""
        return _native.find_words(self.segment.buffer, HEADER_BYTES, self._mask + 1, array("Q", fingerprints))

    def all(self) -> set[int]:
        """Return all fingerprints; one that is being moved may be missing."""
        words = self.segment.buffer[HEADER_BYTES:].cast("Q")
        return set(words) - {0}

    def close(self) -> None:
        self.segment.close()

    def _load(self, slot: int) -> int:
        # SYNC: pairs with FingerprintWriter._store; words are read whole; nothing else is needed.
        return _native.load_u64(self.segment.buffer, HEADER_BYTES + _WORD_BYTES * slot)

    def _find(self, fingerprint: int) -> int:
        """Return the slot of a fingerprint; -1 if it is missing."""
        slot = fingerprint & self._mask
        for _ in range(self._mask + 1):  # bounds the search if the set changes or is corrupt
            word = self._load(slot)
            if word == fingerprint:
                return slot
            if not word:
                return -1
            slot = slot + 1 & self._mask
        return -1


class FingerprintWriter(FingerprintSet):
    """The writer's end."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._num_used = 0
        self.clear()

    def add(self, fingerprint: int) -> bool:
        """Add a fingerprint. False if it is there already, or the set is full."""
        if self._num_used >= self._mask // 8 * 7 or self._find(fingerprint) >= 0:
            return False
        slot = fingerprint & self._mask
        while self._load(slot):
            slot = slot + 1 & self._mask
        self._store(slot, fingerprint)
        self._num_used += 1
        return True

    def remove(self, fingerprint: int) -> None:
        """Remove a fingerprint if it is there, and move later ones up, so that no probe ends too early."""
        hole = self._find(fingerprint)
        if hole < 0:
            return
        slot = hole
        while word := self._load(slot := slot + 1 & self._mask):
            if (slot - word) & self._mask >= (slot - hole) & self._mask:  # its probe passes the hole
                self._store(hole, word)
                hole = slot
        self._store(hole, 0)
        self._num_used -= 1

    def add_all(self, fingerprints: Iterable[int]) -> None:
        for fingerprint in fingerprints:
            self.add(fingerprint)

    def remove_all(self, fingerprints: Iterable[int]) -> None:
        for fingerprint in fingerprints:
            self.remove(fingerprint)

    def clear(self) -> None:
        self._num_used = 0
        self.segment.buffer[HEADER_BYTES:] = bytes(self.segment.buffer.nbytes - HEADER_BYTES)

    def _store(self, slot: int, word: int) -> None:
        # SYNC: pairs with FingerprintSet._load.
        _native.store_u64(self.segment.buffer, HEADER_BYTES + _WORD_BYTES * slot, word)
