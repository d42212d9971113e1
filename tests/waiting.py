"""Waiting for a condition with a watchdog, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WATCHDOG_S = 120.0  # for what takes a second: a busy machine may be that slow, and only a failure waits so long


def wait_until(predicate: Callable[[], T], timeout_s: float = WATCHDOG_S, what: str = "") -> T:
    """Call `predicate` until it returns something true and return that; TimeoutError names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(0.005)
