"""Counter of event-loop turns while something runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_and_count(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Return the result of `work` and the number of loop turns that other tasks got meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> T:
        counting = asyncio.ensure_future(count())
        try:
            return await work
        finally:
            counting.cancel()

    return asyncio.run(scenario()), turns
