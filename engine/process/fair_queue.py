"""Queue with a line for each request, served in turn: a request with many items delays itself and not the others.

Used by the api processes (for a tokenizer's ring) and by the tokenizer processes (for the scheduler's ring, for their helpers).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by key; in the order of pushing for one key."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._queues

    def __iter__(self) -> Iterator[T]:
        for queue in self._queues.values():
            yield from queue

    def count(self, key: str) -> int:
        """Items of a key."""
        return len(self._queues.get(key, ()))

    @property
    def num_keys(self) -> int:
        return len(self._queues)

    def push(self, key: str, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def front(self) -> deque[T]:
        """Return the items of the key that has its turn, to be taken from the left; then call `pass_on`."""
        return next(iter(self._queues.values()))

    def pass_on(self) -> None:
        """The turn of the front key is over."""
        key, queue = next(iter(self._queues.items()))
        if queue:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]

    def pop(self) -> T:
        """Return one item of the key that has its turn."""
        item = self.front().popleft()
        self.pass_on()
        return item

    def remove(self, key: str, item: T) -> bool:
        """Take an item out; False where it is not here (any more)."""
        queue = self._queues.get(key)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[key]
        return True
