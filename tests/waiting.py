"""Waiting for a condition with a watchdog, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout_s: float = 30.0, what: str = "") -> T:
    """Call `predicate` until it returns something true and return that; TimeoutError names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(0.005)
