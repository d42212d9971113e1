"""Number of log-probabilities that one api process holds for clients, per source.

Each takes about a hundred bytes, and stays until its client has read it: in a stream until it is written, in a whole answer
until that is read to its end. If a source has no room, its sequences are paused (`EngineClient`) and continue when others of
its answers have been read. Small answers always have room, and so has the oldest one of a source, so that there is always
progress.
"""

from __future__ import annotations

from collections import Counter

from engine.process.shares import has_room

MAX_OF_SOURCE = 1 << 20  # log-probabilities of one source, while no other source holds any
FREE = 1 << 12  # for each request


class HeldLogprobs:
    def __init__(self) -> None:
        self._num_held = Counter[str]()  # by source
        self._num_all = 0

    def add(self, source: str, number: int) -> None:
        """Add to the count of a source; a negative number subtracts."""
        self._num_all += number
        self._num_held[source] += number
        if not self._num_held[source]:
            del self._num_held[source]

    def has_room(self, source: str, num_more: int = 0) -> bool:
        return has_room(self._num_held[source], self._num_all, MAX_OF_SOURCE, num_more)

    @property
    def num_all(self) -> int:
        return self._num_all
