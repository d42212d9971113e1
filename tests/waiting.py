"""Waiting for a condition with a watchdog, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WATCHDOG_S = 120.0  # for operations of about a second: a busy machine may be that slow, and only a failure waits that long


def wait_until(predicate: Callable[[], T], timeout_s: float = WATCHDOG_S, what: str = "") -> T:
    """Call `predicate` until it returns something true and return that; TimeoutError names `what` after `timeout_s`. The
    interval between calls grows, because the awaited processes need the processors."""
    begun = time.monotonic()
    while True:
        value = predicate()
        if value:
            return value
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(min(max(waited_s / 5, 0.002), 0.2))
