"""The cached blocks of a replica, as an engine's link tells routers: all of them, then changes.

Reads the fingerprints that the cache actor writes (`shm/fingerprints.py`), only when that actor has done something since, and
at most for a twentieth of the time.
"""

from __future__ import annotations

import time
from array import array

from engine.process.context import ActorContext
from engine.process.topology import CACHE, names_of
from shm.fingerprints import FingerprintSet

_SHARE = 20  # of the time is at most spent on looking


class CachedBlocks:
    """Blocks of the replica `index`."""

    def __init__(self, context: ActorContext, index: int) -> None:
        cache = names_of(CACHE, len(context.schedulers))[index]
        self._set = FingerprintSet.attach(context.run.run_id, cache)
        self._row = context.counters.actor(cache)
        self._known: set[int] = set()
        self._seen = (0, 0)  # epoch and step of the cache actor when they were read
        self._next_look_ns = 0

    def whole(self) -> bytes:
        """Return all fingerprints that were told so far."""
        return array("Q", self._known).tobytes()

    def change(self) -> tuple[bytes, bytes] | None:
        """Return the fingerprints added and removed since the last call; None: none."""
        now_ns = time.monotonic_ns()
        seen = self._row.epoch, self._row.step
        if seen == self._seen or now_ns < self._next_look_ns:
            return None
        self._seen = seen
        found = self._set.all()
        added, removed = found - self._known, self._known - found
        self._known = found
        self._next_look_ns = now_ns + _SHARE * (time.monotonic_ns() - now_ns)
        return (array("Q", added).tobytes(), array("Q", removed).tobytes()) if added or removed else None
