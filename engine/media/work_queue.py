"""Whose files the media process works on next: requests take turns, by the work that was done for each. Pure decisions.

Weighted fair queueing (Demers, Keshav and Shenker, 1989), with work that is known when it is done. A request has had its share
up to its `share`, an amount of work; the present is what a request has had of it that was there all along. A turn of one moves
the present by what it was to each of those who wait, so whoever waits gets on, whatever new requests come. A new request
begins at the present. Who would have had the least after a turn goes next, if the turn is as long as its last: so a new
request waits for what is in hands, and no request has a second large file worked on before everybody else had as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[K, T]):
    """What is still to be done for a request, the first in front."""

    share: float
    last_pixels: float = 0.0  # of its last turn; 0: it had none
    waiting: dict[K, T] = field(default_factory=dict)


class WorkQueue(Generic[K, T]):
    """Work that waits, by request and key."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[K, T]] = {}
        self._requests: dict[K, str] = {}  # of all that waits, by key
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def keys(self) -> Collection[K]:
        """Of all that waits."""
        return self._requests.keys()

    def add(self, request: str, key: K, work: T) -> None:
        """At the end of the request's line, once, however often it is asked for."""
        if key not in self._requests:
            self._requests[key] = request
            self._lines.setdefault(request, _Line(self._now)).waiting[key] = work

    def next(self, can_go: Callable[[T], bool]) -> tuple[K, T] | None:
        """What goes now, of what can: it stays there until `remove`. None: nothing can."""
        for line in sorted(self._lines.values(), key=lambda line: line.share + line.last_pixels):
            for key, work in line.waiting.items():
                if can_go(work):
                    return key, work
        return None

    def worked(self, key: K, num_pixels: float) -> None:
        """So much was done for it."""
        line = self._lines[self._requests[key]]
        others = [other for other in self._lines.values() if other.waiting and other is not line]
        line.share = (line.share if others else max(line.share, self._now)) + num_pixels
        line.last_pixels = num_pixels
        self._now += num_pixels / (1 + len(others))

    def remove(self, key: K) -> T | None:
        """It was done, or nobody wants it any more. None: it does not wait."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        work = self._lines[request].waiting.pop(key)
        self._lines = {name: line for name, line in self._lines.items() if line.waiting or line.share > self._now}
        return work
