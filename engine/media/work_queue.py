"""Order of the media process's work: requests take turns, by the work that was done for each. Pure decisions.

Weighted fair queueing (Demers, Keshav and Shenker, 1989), with work that is known when it is done. A request has had its share
up to its `share`, an amount of work; the present is the share of a request that was there all along. A turn moves the present
by its work divided by the number of waiting requests, so every waiting request gets on, whatever new requests come. A new
request begins at the present. The request that would have had the least after a turn as long as its last goes next: so a new
request waits for the work in progress, and no request has a second large file decoded before the others had as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[K, T]):
    """Work of one request, the first in front."""

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
        """Return the keys of all waiting work."""
        return self._requests.keys()

    def add(self, request: str, key: K, work: T) -> None:
        """Add work at the end of the request's line, once, however often it is asked for."""
        if key not in self._requests:
            self._requests[key] = request
            self._lines.setdefault(request, _Line(self._now)).waiting[key] = work

    def next(self, can_go: Callable[[T], bool]) -> tuple[K, T] | None:
        """Return the next work that can go; it stays in the queue until `remove`. None: none can."""
        for line in sorted(self._lines.values(), key=lambda line: line.share + line.last_pixels):
            for key, work in line.waiting.items():
                if can_go(work):
                    return key, work
        return None

    def worked(self, key: K, num_pixels: float) -> None:
        """Count `num_pixels` of work for a key."""
        line = self._lines[self._requests[key]]
        others = [other for other in self._lines.values() if other.waiting and other is not line]
        line.share = (line.share if others else max(line.share, self._now)) + num_pixels
        line.last_pixels = num_pixels
        self._now += num_pixels / (1 + len(others))

    def remove(self, key: K) -> T | None:
        """Remove work that is done or not wanted any more. None: it does not wait."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        work = self._lines[request].waiting.pop(key)
        self._lines = {name: line for name, line in self._lines.items() if line.waiting or line.share > self._now}
        return work
