"""Queue with a line of items for each key; the line with the lowest cost is next. Decisions only.

Used by the api processes (for a tokenizer's ring, for links to fetch), by the tokenizer processes (for the scheduler's ring,
for their helpers, for replays) and by the media processes. A key is a request, or the API key or address of its client.

Among lines of equal cost, the one that has waited longest is next, since it came or since its last turn. The user of the queue
decides what costs:
- nothing: the lines take turns;
- work in progress for a key: `charge` it, and take it back when it ends;
- the work done for a key so far: `charge` it, then `advance`.

Waiting sequences, with priorities and sources that own requests, are ordered by `FairShare` (`engine/scheduler/fair_share.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Line(msgspec.Struct, Generic[K, T], eq=False):
    key: K
    cost: float
    next_cost: float = 0  # expected cost of its next turn
    since: int = 0  # number of its arrival or last turn; 0: it does not wait
    items: deque[T] = msgspec.field(default_factory=deque)


class FairQueue(Generic[K, T]):
    """Items by key, in order of arrival for each key."""

    def __init__(self) -> None:
        self._lines: dict[K, _Line[K, T]] = {}  # those that wait, and those with a higher cost than a new one
        self._order: list[tuple[float, int, _Line[K, T]]] = []  # waiting lines: cost after the next turn, since, line
        self._num_turns = 0
        self._new_cost = 0.0  # initial cost of a new line

    def __bool__(self) -> bool:
        return bool(self._order)

    def __len__(self) -> int:
        return sum(len(line.items) for _, _, line in self._order)

    def __contains__(self, key: K) -> bool:
        line = self._lines.get(key)
        return line is not None and line.since > 0

    def __iter__(self) -> Iterator[T]:
        """Yield all items, line by line. Nothing may change meanwhile."""
        for _, _, line in self._order:
            yield from line.items

    def count(self, key: K) -> int:
        """Return the number of items of a key."""
        line = self._lines.get(key)
        return len(line.items) if line else 0

    @property
    def num_keys(self) -> int:
        return len(self._order)

    @property
    def front_key(self) -> K:
        return self._order[0][2].key

    def push(self, key: K, item: T) -> None:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key, self._new_cost)
        line.items.append(item)
        if not line.since:
            self._enter(line)

    def front(self) -> deque[T]:
        """Return the items of the next line, to be taken from the left; then call `pass_on`."""
        return self._order[0][2].items

    def pass_on(self) -> None:
        """End the turn of the next line."""
        line = self._order.pop(0)[2]
        if line.items:
            self._enter(line)
        else:
            self._retire(line)

    def pop(self) -> T:
        """Return one item of the next line, and end its turn."""
        item = self._order[0][2].items.popleft()
        self.pass_on()
        return item

    def remove(self, key: K, item: T) -> bool:
        """Remove an item. Return False if it is not here (any more)."""
        line = self._lines.get(key)
        if line is None or item not in line.items:
            return False
        line.items.remove(item)
        if not line.items:
            del self._order[self._index(line)]
            self._retire(line)
        return True

    # -------------------------------------------------------------------------------------------------------------- costs

    def cost(self, key: K) -> float:
        line = self._lines.get(key)
        return line.cost if line else self._new_cost

    def charge(self, key: K, cost: float, next_cost: float = 0) -> None:
        """Add to the cost of a key, or take back what it was charged. `next_cost`: what its next turn is expected to cost."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key, self._new_cost)
        self._set_cost(line, line.cost + cost, next_cost)

    def advance(self, cost: float) -> None:
        """Let new lines begin with an equal share of the work done while others wait, so that they cannot starve these.

        A line that waits alone keeps no credit. A line that does not wait is forgotten once a new one would cost as much.
        (Weighted fair queueing: Demers, Keshav and Shenker, 1989, with costs that are known when work is done.)"""
        self._new_cost += cost / len(self._order)
        if len(self._order) == 1:
            line = self._order[0][2]
            self._set_cost(line, max(line.cost, self._new_cost), line.next_cost)
        if len(self._lines) > len(self._order):
            for line in [line for line in self._lines.values() if not line.since]:
                self._retire(line)

    def _set_cost(self, line: _Line[K, T], cost: float, next_cost: float) -> None:
        if line.since:
            del self._order[self._index(line)]
        line.cost, line.next_cost = cost, next_cost
        if line.since:
            insort(self._order, (cost + next_cost, line.since, line))
        else:
            self._retire(line)

    def _index(self, line: _Line[K, T]) -> int:
        return bisect_left(self._order, (line.cost + line.next_cost, line.since))

    def _enter(self, line: _Line[K, T]) -> None:
        """Put a line in its place, after those of equal cost."""
        self._num_turns += 1
        line.since = self._num_turns
        insort(self._order, (line.cost + line.next_cost, line.since, line))

    def _retire(self, line: _Line[K, T]) -> None:
        """Keep a line that does not wait only if it costs more than a new one."""
        line.since = 0
        if line.cost <= self._new_cost:
            del self._lines[line.key]
