"""Slots for links: a limited number at a time in one api process, shared by the sources that have links.

Used by `download.py` in the event loop. A source is a key or an address (`source_of` of `api/access.py`). The source with the
fewest slots is next (`FairQueue`: a slot costs 1 until it is given back), and the last quarter of all slots is for sources
without one: slow links of one client leave room for the first link of another, regardless of the number of requests. A thread
may still use a slot after its request gave up (a name service that does not answer cannot be interrupted); the slot is given
back when both have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engine.errors import RequestError
from engine.process.fair_queue import FairQueue
from engine.process.shares import has_room

RETRY_AFTER_S = 1
WAITING_FACTOR = 4  # links of one source that may wait, per slot

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
    """`num_turns` slots, each with at most one thread."""

    def __init__(self, name: str, num_turns: int) -> None:
        self.num_turns = num_turns
        self._num_free = num_turns
        self._num_kept = num_turns // 4  # for sources without a slot
        self._waiting: FairQueue[object, asyncio.Future[None]] = FairQueue()  # by source; its cost is the number of its slots
        self._threads = ThreadPoolExecutor(num_turns, thread_name_prefix=name)

    async def take(self, source: object, timeout_s: float) -> FetchSlot:
        """Wait for the next slot of a source. Raises RequestError (429) if too many wait, or none became free in time."""
        if not self._may_take(source):
            await self._wait(source, timeout_s)
        else:
            self._grant(source)
        return FetchSlot(self, source)

    def give_back(self, source: object) -> None:
        self._num_free += 1
        self._waiting.charge(source, -1)
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
        return self._num_free > (self._num_kept if self._waiting.cost(source) else 0)

    def _grant(self, source: object) -> None:
        self._num_free -= 1
        self._waiting.charge(source, 1)

    async def _wait(self, source: object, timeout_s: float) -> None:
        if not has_room(self._waiting.count(source), len(self._waiting), WAITING_FACTOR * self.num_turns):
            raise busy(self.num_turns)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(source, granted)
        try:
            await asyncio.wait((granted,), timeout=timeout_s)
        except asyncio.CancelledError:
            if granted.done():
                self.give_back(source)
            else:
                self._waiting.remove(source, granted)
            raise
        if not granted.done():
            self._waiting.remove(source, granted)
            raise busy(self.num_turns)

    def _serve(self) -> None:
        """Grant free slots. The next source has the fewest slots, so if it may not take another, no source may."""
        while self._waiting and self._may_take(source := self._waiting.front_key):
            granted = self._waiting.pop()
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
