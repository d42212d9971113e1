"""Which link is next: a limited number at a time in one api process, shared out among the sources that have links.

Used by `download.py` in the event loop. A source is a key or an address (`source_of` of `api/access.py`). The source with the
fewest links under way comes first, and the last quarter of all slots is for sources that have none: one client's slow links
leave room for another's first, however many requests they belong to. What takes a slot may still be busy in a thread
after its request gave up (a name service that does not answer cannot be interrupted); the slot ends with both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engine.errors import RequestError
from engine.process.shares import has_room

RETRY_AFTER_S = 1
WAITING_FACTOR = 4  # links that one source may have waiting, for each slot there is

P = ParamSpec("P")
T = TypeVar("T")


def busy(num_turns: int) -> RequestError:
    return RequestError(
        f"too many links are waiting to be fetched ({num_turns} are fetched at a time); try again later",
        status=429,
        code="media_downloads_full",
        retry_after_s=RETRY_AFTER_S,
    )


class FetchSlots:
    """`num_turns` at a time, each with at most one thread at a time."""

    def __init__(self, name: str, num_turns: int) -> None:
        self.num_turns = num_turns
        self._num_free = num_turns
        self._num_kept = num_turns // 4  # for sources that have none
        self._num_used = Counter[object]()  # by source
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}  # the longest waiting source first
        self._threads = ThreadPoolExecutor(num_turns, thread_name_prefix=name)

    async def take(self, source: object, timeout_s: float) -> FetchSlot:
        """The next slot of a source. RequestError (429): too many wait, or none came within so long."""
        if not self._may_take(source):
            await self._wait(source, timeout_s)
        else:
            self._grant(source)
        return FetchSlot(self, source)

    def give_back(self, source: object) -> None:
        self._num_free += 1
        self._num_used[source] -= 1
        if not self._num_used[source]:
            del self._num_used[source]
        self._serve()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, slot: FetchSlot, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future = self._threads.submit(call, *args, **kwargs)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits for a slot
                loop.call_soon_threadsafe(slot.release)

        slot.hold()
        future.add_done_callback(ended)
        return asyncio.wrap_future(future)

    def _may_take(self, source: object) -> bool:
        return self._num_free > (self._num_kept if self._num_used[source] else 0)

    def _grant(self, source: object) -> None:
        self._num_free -= 1
        self._num_used[source] += 1

    async def _wait(self, source: object, timeout_s: float) -> None:
        num_own, num_all = len(self._waiting.get(source, ())), sum(map(len, self._waiting.values()))
        if not has_room(num_own, num_all, WAITING_FACTOR * self.num_turns):
            raise busy(self.num_turns)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(source, deque()).append(granted)
        try:
            await asyncio.wait((granted,), timeout=timeout_s)
        except asyncio.CancelledError:
            if granted.done():
                self.give_back(source)
            else:
                self._forget(source, granted)
            raise
        if not granted.done():
            self._forget(source, granted)
            raise busy(self.num_turns)

    def _forget(self, source: object, granted: asyncio.Future[None]) -> None:
        self._waiting[source].remove(granted)
        if not self._waiting[source]:
            del self._waiting[source]

    def _serve(self) -> None:
        while able := [source for source in self._waiting if self._may_take(source)]:
            source = min(able, key=lambda source: self._num_used[source])
            waiting = self._waiting.pop(source)
            granted = waiting.popleft()
            if waiting:
                self._waiting[source] = waiting  # behind the others
            self._grant(source)
            granted.set_result(None)


class FetchSlot:
    """Slot of one link; it is free when its last holder leaves."""

    def __init__(self, slots: FetchSlots, source: object) -> None:
        self._slots = slots
        self._source = source
        self._num_holders = 1

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run `call` in a thread, which holds the slot until it ends, also after its request gave up."""
        return self._slots.submit(self, call, *args, **kwargs)

    def hold(self) -> None:
        self._num_holders += 1

    def release(self) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            self._slots.give_back(self._source)
