"""Kill -9 any process behind the edge, and every stream goes on byte for byte."""

from __future__ import annotations

import asyncio
import random
import signal

import httpx
import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.workload import answers, mixed_bodies, stream_all, stream_one
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--max-model-len", "1200", "--restart-limit", "100")
VICTIMS = ("tokenizer0", "scheduler", "cache", "worker0")
ROUNDS = 3


async def kill_in_turn(engine: EngineProcess, deltas: asyncio.Semaphore, rng: random.Random) -> list[str]:
    """Kill each victim ROUNDS times, each at a random moment of the stream, and wait until it is back."""
    killed = []
    for victim in VICTIMS * ROUNDS:
        for _ in range(rng.randrange(1, 300)):
            await asyncio.wait_for(deltas.acquire(), timeout=WATCHDOG_S)
        epoch = await asyncio.to_thread(engine.kill, victim)
        killed.append(victim)
        await asyncio.to_thread(engine.wait_for_restart, victim, epoch)
    return killed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_survive_every_kill(precision: str) -> None:
    bodies = mixed_bodies(32, seed=5, max_tokens=1000, max_prompt=150)
    with EngineProcess(MODEL, *OPTIONS, *PRECISIONS[precision]) as engine:
        undisturbed = answers(engine, bodies)
        before = engine.metric("actor_restarts_total")

        async def disturbed_run() -> list[str]:
            deltas = asyncio.Semaphore(0)
            killer = asyncio.create_task(kill_in_turn(engine, deltas, random.Random(77)))
            while not killer.done():
                assert await stream_all(engine.url, bodies, 32, deltas.release) == undisturbed
            return await killer

        killed = asyncio.run(disturbed_run())
        assert len(killed) == len(VICTIMS) * ROUNDS
        assert engine.metric("actor_restarts_total") - before == len(killed)
        assert engine.metric("resubmissions_total") > 0
        for victim in VICTIMS:
            assert engine.actors()[victim]["restarts"] == ROUNDS
        engine.wait_until_idle()


def test_a_killed_api_process_takes_only_its_own_requests() -> None:
    bodies = mixed_bodies(24, seed=6, max_tokens=1000, max_prompt=60)
    with EngineProcess(MODEL, *OPTIONS, "--api-processes", "2") as engine:
        undisturbed = answers(engine, bodies)

        async def run_and_kill() -> list[object]:
            flowing = [asyncio.Event() for _ in bodies]
            async with httpx.AsyncClient(
                base_url=engine.url, timeout=WATCHDOG_S, limits=httpx.Limits(max_keepalive_connections=0)
            ) as client:
                tasks = [
                    asyncio.create_task(stream_one(client, body, begun.set))
                    for body, begun in zip(bodies, flowing, strict=True)
                ]
                for begun in flowing:
                    await asyncio.wait_for(begun.wait(), timeout=WATCHDOG_S)
                epoch = await asyncio.to_thread(engine.kill, "api0")
                results = await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.to_thread(engine.wait_for_restart, "api0", epoch)
                return list(results)

        results = asyncio.run(run_and_kill())
        cut = [result for result in results if isinstance(result, httpx.TransportError)]
        assert 0 < len(cut) < len(bodies), "the kernel spreads connections over both api processes"
        for result, expected in zip(results, undisturbed, strict=True):
            assert isinstance(result, httpx.TransportError) or result == expected
        engine.wait_until_idle()
        assert engine.metric("requests_aborted_total") >= len(cut)
        assert answers(engine, bodies[:4]) == undisturbed[:4]


def test_a_hung_actor_is_replaced() -> None:
    """SIGSTOP is a hang: health names the actor, the supervisor replaces it, the streams end as if nothing had happened."""
    bodies = mixed_bodies(8, seed=7, max_tokens=600, max_prompt=40)
    with EngineProcess(MODEL, *OPTIONS, "--hang-timeout", "6") as engine:
        undisturbed = answers(engine, bodies)

        async def run_and_stop() -> None:
            flowing = asyncio.Event()
            streams = asyncio.create_task(stream_all(engine.url, bodies, 8, flowing.set))
            await asyncio.wait_for(flowing.wait(), timeout=WATCHDOG_S)
            epoch = await asyncio.to_thread(engine.kill, "scheduler", signal.SIGSTOP)
            await asyncio.to_thread(wait_for_503, engine, "scheduler")
            await asyncio.to_thread(engine.wait_for_restart, "scheduler", epoch)
            assert await streams == undisturbed

        asyncio.run(run_and_stop())
        assert engine.metric("actor_hangs_total") == 1


def wait_for_503(engine: EngineProcess, actor: str) -> None:
    def is_named() -> bool:
        answer = httpx.get(f"{engine.url}/health", timeout=WATCHDOG_S)
        return answer.status_code == 503 and actor in answer.text

    wait_until(is_named, what=f"/health names {actor}")
