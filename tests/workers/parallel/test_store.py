"""The store of groups, as Paddle's own clients see it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from paddle.base import core

from engine.supervisor.port import reserve_port
from tests.waiting import WATCHDOG_S
from workers.parallel.store import LOOPBACK, GroupStore


def test_clients_of_paddle() -> None:
    """On a port that somebody holds, and on the loopback alone."""
    with reserve_port(LOOPBACK, 0) as holder, ThreadPoolExecutor(1) as thread:
        store = GroupStore(holder.getsockname()[1])
        assert store.server_address == holder.getsockname()
        one, other = (core.TCPStore(LOOPBACK, store.server_address[1], False, 2) for _ in range(2))
        waiting = thread.submit(lambda: (one.wait("key"), one.get("key")))
        assert [other.add("arrived", 1), other.add("arrived", 2)] == [1, 3]
        other.set("key", "value")
        assert waiting.result(WATCHDOG_S) == (None, b"value")
