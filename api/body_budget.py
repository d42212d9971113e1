"""Memory for request bodies in one api process, for all connections together.

Each body has its own limit; a thousand connections at that limit would still fill the memory. So large bodies share a budget
while they are read and decoded. Small ones, which nearly all are, do not count and are never rejected for it.

A source may use at most as much as it leaves free for others (`engine/process/shares.py`). If there is no room, the slowest
bodies lose theirs; a body that arrives fast enough keeps it.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from engine.errors import RequestError
from engine.process.shares import has_room

FREE_BYTES = 64 << 10  # per body
LARGEST_BODIES = 8  # that one source may hold at once
GRACE_NS = 30_000_000_000  # how far a body may be behind its pace
LEAST_BODY_BYTES_PER_S = 64 << 10
PATIENCE_NS = 2_000_000_000  # a body that is further behind than this may lose its room to others


class BodyBudget:
    def __init__(self, max_body_bytes: int) -> None:
        self._limit = LARGEST_BODIES * max_body_bytes
        self._shares: dict[BodyShare, None] = {}  # of bodies being read or decoded

    def share(self, source: str = "", begin_ns: int = 0) -> BodyShare:
        """Return the share of a request's body from `source` that arrived at `begin_ns` (CLOCK_MONOTONIC)."""
        return BodyShare(self, source, begin_ns or time.monotonic_ns())

    def enter(self, share: BodyShare) -> None:
        self._shares[share] = None

    def leave(self, share: BodyShare) -> None:
        self._shares.pop(share, None)

    def make_room(self, share: BodyShare, num_more: int) -> None:
        """Make room for `num_more` bytes of a body, if necessary by displacing slower ones. Raises RequestError (503) if there
        is none."""
        now_ns = time.monotonic_ns()
        while not self._has_room(share, num_more):
            slow = [other for other in self._shares if other is not share and other.is_slow(now_ns)]
            if not slow:
                raise RequestError(
                    (
                        f"large request bodies use {self._num_bytes()} bytes of memory, {self._num_bytes(share.source)} of "
                        f"them yours, limit {self._limit}; try again later"
                    ),
                    status=503,
                    code="unavailable",
                    retry_after_s=1,
                )
            min(slow, key=lambda other: other.deadline_ns).displace()

    def _has_room(self, share: BodyShare, num_more: int) -> bool:
        num_all = self._num_bytes()
        num_own = self._num_bytes(share.source) if share.source else num_all
        return has_room(num_own + num_more, num_all + num_more, self._limit, 0)  # a body may be a large part of the total

    def _num_bytes(self, source: str | None = None) -> int:
        return sum(share.num_bytes for share in self._shares if source is None or share.source == source)


class BodyShare:
    """Part of the budget used by one body until the block ends, and the pace at which it arrives."""

    def __init__(self, budget: BodyBudget, source: str, begin_ns: int) -> None:
        self.source = source
        self.num_bytes = 0  # beyond the free ones
        self.deadline_ns = begin_ns + GRACE_NS  # for the next bytes
        self.is_displaced = False
        self.arriving: asyncio.Future[Any] | None = None  # the wait for more of it
        self._budget = budget

    def grow_to(self, num_bytes: int, now_ns: int | None = None) -> None:
        """Note that more of the body has arrived: allocate room, and extend its deadline."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        more = max(num_bytes - FREE_BYTES, 0) - self.num_bytes
        if more > 0:
            self._budget.make_room(self, more)
            self.num_bytes += more
            self.deadline_ns += int(more / LEAST_BODY_BYTES_PER_S * 1e9)
            self.deadline_ns = min(self.deadline_ns, now_ns + GRACE_NS)

    def is_slow(self, now_ns: int) -> bool:
        """Return whether it holds room and is behind its pace."""
        return self.num_bytes > 0 and self.arriving is not None and self.deadline_ns - now_ns < GRACE_NS - PATIENCE_NS

    def displace(self) -> None:
        """Give its room to another body; the wait for more of it is cancelled."""
        assert self.arriving is not None
        self.is_displaced = True
        self.num_bytes = 0
        self.arriving.cancel()

    def __enter__(self) -> BodyShare:
        self._budget.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._budget.leave(self)
