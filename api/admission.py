"""Decides which open connections of one api process may send requests, so that no client address takes them all.

Used by `connection.Connection`, in the event loop. An address is a network of one user (`access.neighbourhood`). It may have
`max_per_address` connections; 0: as many as it leaves free for others (`engine/process/shares.py`). Connections of trusted
proxies and of a UNIX socket, which may carry requests of many users, only count towards the total limit.

A connection beyond the limits is accepted for a short time: `/health` is answered, so that health checks always work, and any
other request is rejected with the reason. If there are too many of these, the oldest is closed.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from api.access import is_within, neighbourhood
from engine.errors import RequestError

MAX_SURPLUS = 32
HEALTH_PATHS = (b"/health", b"/health/live")


class Member(Protocol):
    """A connection."""

    def cut(self) -> None: ...


class Admission:
    def __init__(
        self, max_connections: int, max_per_address: int = 0, proxies: tuple[str, ...] = (), root_path: str = ""
    ) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._proxies = proxies
        self._open_paths = {prefix + path for prefix in (b"", root_path.encode()) for path in HEALTH_PATHS}
        self._admitted: dict[Member, str] = {}  # with their addresses; empty: not limited by address
        self._num_admitted = Counter[str]()  # by address
        self._surplus: dict[Member, str] = {}  # the oldest first

    def enter(self, member: Member, host: str) -> bool:
        """Register a connection of `host` (empty: of a UNIX socket); return whether it is admitted."""
        address = "" if not host or is_within(host, self._proxies) else neighbourhood(host)
        if self._refusal(address) is None:
            self._admit(member, address)
            return True
        if len(self._surplus) >= MAX_SURPLUS:
            next(iter(self._surplus)).cut()
        self._surplus[member] = address
        return False

    def leave(self, member: Member) -> None:
        self._surplus.pop(member, None)
        address = self._admitted.pop(member, None)
        if address is not None:
            self._num_admitted[address] -= 1
            if not self._num_admitted[address]:
                del self._num_admitted[address]

    def check(self, member: Member, path: bytes) -> None:
        """Check a request. Raises RequestError (429, 503) if its connection is still not admitted."""
        address = self._surplus.get(member)
        if address is None or path.partition(b"?")[0] in self._open_paths:
            return
        refusal = self._refusal(address)
        if refusal is not None:
            raise refusal
        del self._surplus[member]
        self._admit(member, address)

    def is_surplus(self, member: Member) -> bool:
        return member in self._surplus

    def _admit(self, member: Member, address: str) -> None:
        self._admitted[member] = address
        self._num_admitted[address] += 1

    def _refusal(self, address: str) -> RequestError | None:
        """Return why another connection of an address is not admitted; None if it is."""
        num_all, num_own = len(self._admitted), self._num_admitted[address] if address else 0
        if num_all >= self._max_connections:
            text = f"too many connections: {num_all} are open, limit {self._max_connections} (--max-connections)"
            return RequestError(f"{text}; try again later", status=503, code="too_many_connections", retry_after_s=1)
        limit = max(1, self._max_per_address or self._max_connections - num_all)
        if address and num_own >= limit:
            text = f"too many connections from one address: {num_own} are open, limit {limit} (--max-connections-per-address)"
            text += "; close some, or reuse connections"
            return RequestError(text, status=429, code="too_many_connections", retry_after_s=1)
        return None
