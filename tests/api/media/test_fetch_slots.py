"""Slots for links are shared among requests, and blocking calls have threads of their own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from api.media.fetch_slots import WAITING_FACTOR, FetchSlot, FetchSlots
from engine.errors import RequestError
from tests.waiting import WATCHDOG_S


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_source_without_a_slot_goes_first() -> None:
    async def scenario() -> None:
        slots = FetchSlots("test", 8)
        greedy = [asyncio.ensure_future(slots.take("greedy", WATCHDOG_S)) for _ in range(20)]
        await settled()
        held = [task.result() for task in greedy if task.done()]
        assert len(held) == 6  # the last quarter is kept
        modest = await asyncio.wait_for(slots.take("modest", WATCHDOG_S), WATCHDOG_S)
        second = asyncio.ensure_future(slots.take("modest", WATCHDOG_S))
        await settled()
        held.pop().release()
        held.pop().release()
        await settled()
        assert second.done()  # it had fewer under way than the greedy one, which has waited for longer
        modest.release()
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)

    asyncio.run(scenario())


def test_source_leaves_others_room_to_wait() -> None:
    async def scenario() -> None:
        slots = FetchSlots("test", 4)
        own = [asyncio.ensure_future(slots.take("greedy", WATCHDOG_S)) for _ in range(10 * WAITING_FACTOR)]
        await settled()
        refused = [task for task in own if task.done() and task.exception() is not None]
        assert len(refused) > len(own) // 3
        others = [asyncio.ensure_future(slots.take("modest", WATCHDOG_S)) for _ in range(3)]
        await settled()
        assert [task.done() for task in others] == [True, False, False]
        for task in (*own, *others):
            task.cancel()
        await asyncio.gather(*own, *others, return_exceptions=True)

    asyncio.run(scenario())


def test_queue_is_bounded_and_drops_cancelled_waiters() -> None:
    async def scenario() -> None:
        slots = FetchSlots("test", 1)
        slot = await slots.take("a", WATCHDOG_S)
        waiting = [asyncio.ensure_future(slots.take(f"b{index}", WATCHDOG_S)) for index in range(2 * WAITING_FACTOR)]
        await settled()
        with pytest.raises(RequestError) as caught:
            await slots.take("c", WATCHDOG_S)
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "media_downloads_full", 1)
        waiting[0].cancel()
        await settled()
        last = asyncio.ensure_future(slots.take("c", WATCHDOG_S))
        await settled()
        waiting[1].cancel()
        slot.release()  # before those that were cancelled just now have heard of it
        for task in (*waiting[2:], last):
            (await asyncio.wait_for(task, WATCHDOG_S)).release()
        assert (await asyncio.wait_for(slots.take("d", WATCHDOG_S), WATCHDOG_S)) is not None

    asyncio.run(scenario())


def test_abandoned_thread_holds_its_slot_until_it_ends() -> None:
    async def scenario() -> None:
        slots, gate = FetchSlots("test", 1), threading.Event()
        slot = await slots.take("a", WATCHDOG_S)
        call = slot.run(gate.wait, WATCHDOG_S)
        call.cancel()
        slot.release()
        await settled()
        other = asyncio.ensure_future(slots.take("b", WATCHDOG_S))
        gate.set()
        assert isinstance(await asyncio.wait_for(other, WATCHDOG_S), FetchSlot)
        slots.close()

    asyncio.run(scenario())
