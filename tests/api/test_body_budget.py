"""Memory for large request bodies: shared among sources, and taken from slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from starlette.types import Message

from api.body_budget import FREE_BYTES, GRACE_NS, LARGEST_BODIES, LEAST_BODY_BYTES_PER_S, PATIENCE_NS, BodyBudget, BodyShare
from api.request_context import next_part
from engine.errors import RequestError
from tests.waiting import WATCHDOG_S

LARGEST = 1 << 20
WHOLE = LARGEST + FREE_BYTES


@contextlib.contextmanager
def silent(budget: BodyBudget, *sources: str, for_ns: int = 0) -> Iterator[list[BodyShare]]:
    """Yield bodies that lack only their last byte and have been silent for `for_ns`. Needs a running event loop."""
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(budget.share(source)) for source in sources]
        for share in shares:
            share.arriving = asyncio.get_running_loop().create_future()
            share.grow_to(WHOLE, time.monotonic_ns() - for_ns)
        yield shares


def test_one_source_leaves_room_for_another() -> None:
    async def scenario() -> None:
        budget = BodyBudget(LARGEST)
        with silent(budget, *LARGEST_BODIES * ["a"]), budget.share("a") as own, budget.share("b") as other:
            with pytest.raises(RequestError) as caught:
                own.grow_to(WHOLE)
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
            own.grow_to(FREE_BYTES)
            other.grow_to(WHOLE)

    asyncio.run(scenario())


def test_slowest_body_makes_room() -> None:
    async def scenario() -> None:
        budget = BodyBudget(LARGEST)
        with (
            silent(budget, "a", for_ns=2 * PATIENCE_NS) as (slow,),
            silent(budget, "a", for_ns=3 * PATIENCE_NS) as (slowest,),
            silent(budget, *(LARGEST_BODIES - 2) * ["a"]) as quick,
            budget.share("a") as own,
        ):
            own.grow_to(WHOLE)
            assert [share.is_displaced for share in (slowest, slow, *quick)] == [True, *(LARGEST_BODIES - 1) * [False]]
            assert slowest.arriving is not None
            assert slowest.arriving.cancelled()
            own.grow_to(WHOLE + LARGEST)
            assert slow.is_displaced
            with pytest.raises(RequestError):
                own.grow_to(WHOLE + 2 * LARGEST)

    asyncio.run(scenario())


def test_complete_body_is_not_displaced() -> None:
    async def scenario() -> None:
        budget = BodyBudget(LARGEST)
        with silent(budget, *LARGEST_BODIES * ["a"], for_ns=2 * PATIENCE_NS) as shares, budget.share("a") as own:
            for share in shares:
                share.arriving = None  # it is decoded
            with pytest.raises(RequestError):
                own.grow_to(WHOLE)

    asyncio.run(scenario())


def test_only_slow_bodies_fall_behind() -> None:
    async def scenario() -> None:
        with silent(BodyBudget(1 << 30), "a", "b") as (trickle, quick):
            now_ns = time.monotonic_ns()
            for second in range(1, 61):
                moment_ns = now_ns + second * 1_000_000_000
                trickle.grow_to(WHOLE + second, moment_ns)
                quick.grow_to(WHOLE + second * LEAST_BODY_BYTES_PER_S, moment_ns)
            assert trickle.deadline_ns < moment_ns
            assert trickle.is_slow(moment_ns)
            assert quick.deadline_ns >= now_ns + GRACE_NS + 59 * 1_000_000_000
            assert not quick.is_slow(moment_ns)

    asyncio.run(scenario())


def test_displaced_sender_is_told() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        budget = BodyBudget(LARGEST)
        with budget.share("a") as share:
            reading = asyncio.ensure_future(next_part(never, WATCHDOG_S, share))
            while share.arriving is None:
                await asyncio.sleep(0)
            share.displace()
            with pytest.raises(RequestError, match="needed memory") as caught:
                await reading
            assert caught.value.status == 408

    asyncio.run(scenario())
