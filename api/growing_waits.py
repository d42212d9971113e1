"""Waits between retries, while there is no room or no answer. Used by the api processes."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_S, LONGEST_S = 0.05, 5.0


def growing_waits() -> Iterator[float]:
    """Yield seconds without end: each wait is twice as long as the previous one, up to `LONGEST_S`."""
    wait_s = FIRST_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_S)
