"""Kill -9 any process behind the api, and every stream continues byte for byte; in the other precisions too:
`test_identity.py`."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine, Iterable

import httpx
import pytest

from engine.messages import WeightsState
from tests.e2e import protocols
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.kinds import COMPLETIONS, Call, Json, ask_all, every_kind, with_late_stops, words
from tests.e2e.precisions import PRECISIONS
from tests.e2e.workload import answers, mixed_bodies, stream_all, stream_one
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--max-model-len", "1200", "--restart-limit", "100")
VICTIMS = ("tokenizer0", "scheduler", "cache", "worker0")
PAIRS = (("scheduler", "worker0"), ("tokenizer0", "worker0"), ("tokenizer0", "scheduler"), ("cache", "worker0"))


class Deltas:
    """Counter of the deltas of streams, so that a kill comes at a random moment in the middle of them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._missing = 0
        self._enough = asyncio.Event()

    def note(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._enough.set()

    async def flow(self) -> None:
        """Wait until some more deltas have come."""
        self._missing = self._rng.randrange(1, 200)
        self._enough.clear()
        await asyncio.wait_for(self._enough.wait(), timeout=WATCHDOG_S)


def kill_together(engine: EngineProcess, victims: tuple[str, ...]) -> None:
    """Kill actors at once and wait until all are back."""
    epochs = {victim: engine.kill(victim) for victim in victims}
    for victim, epoch in epochs.items():
        engine.wait_for_restart(victim, epoch)


async def kill_in_turn(engine: EngineProcess, deltas: Deltas, victims: Iterable[tuple[str, ...]]) -> None:
    for together in victims:
        await deltas.flow()
        await asyncio.to_thread(kill_together, engine, together)


async def kill_while_it_reloads(engine: EngineProcess, deltas: Deltas) -> None:
    """Kill actors while the weights in use are reloaded: whether the command succeeds or fails, the streams' bytes are the
    same, and the version of a failed one is never used again."""
    latest = engine.metric("engine_weight_version")  # that an order may have got so far
    for victim, mode in (("worker0", "requeue"), ("scheduler", "keep"), ("scheduler", "requeue"), ("worker0", "keep")):
        await deltas.flow()
        version = engine.metric("engine_weight_version")
        reload = asyncio.create_task(asyncio.to_thread(order_reload, engine, mode))

        def has_begun(reload: asyncio.Task[int] = reload) -> bool:
            return reload.done() or engine.metric("engine_state") != WeightsState.NORMAL

        await asyncio.to_thread(wait_until, has_begun, what="the reload begins")
        await asyncio.to_thread(kill_together, engine, (victim,))
        assert await reload in (200, 503)
        await asyncio.to_thread(wait_until, lambda: engine.metric("engine_state") == WeightsState.NORMAL, what="it serves")
        latest += 1
        assert version <= engine.metric("engine_weight_version") <= latest


def order_reload(engine: EngineProcess, mode: str) -> int:
    return httpx.post(f"{engine.url}/admin/reload", json={"mode": mode}, timeout=WATCHDOG_S, headers=OPERATOR).status_code


@pytest.mark.timeout(1200)
def test_streams_survive_every_kill() -> None:
    victims = VICTIMS * 2
    bodies = mixed_bodies(8, seed=5, max_tokens=200, max_prompt=150)
    with EngineProcess(MODEL, *OPTIONS, *PRECISIONS["float32"]) as engine:
        undisturbed = answers(engine, bodies)
        before = engine.metric("actor_restarts_total")

        async def disturbed_run() -> None:
            deltas = Deltas(seed=77)
            killer = asyncio.create_task(kill_in_turn(engine, deltas, [(victim,) for victim in victims]))
            while not killer.done():
                assert await stream_all(engine.url, bodies, 32, deltas.note) == undisturbed
            await killer

        asyncio.run(disturbed_run())
        assert engine.metric("actor_restarts_total") - before == len(victims)
        for victim in victims:
            assert engine.actors()[victim]["restarts"] == victims.count(victim)
        engine.wait_until_idle()


@pytest.mark.timeout(1200)
def test_all_requests_survive_kills_and_a_reload() -> None:
    """Text, events, ids, log-probabilities, ends and usage in every API equal those of an undisturbed run. A deadline only cuts
    an answer."""
    drafts = ("--speculative-config", '{"method": "ngram,suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
    with EngineProcess(MODEL, *OPTIONS, *drafts, *protocols.OPTIONS) as engine:
        calls = every_kind(max_tokens=150)
        calls = with_late_stops(calls, asyncio.run(ask_all(engine.url, calls)))
        overdue = Call(
            COMPLETIONS, {"prompt": words(90, 9), "max_tokens": 1000, "seed": 90, "ignore_eos": True, "stream": True}
        )
        timed = Call(COMPLETIONS, overdue.body | {"timeout": 1})
        undisturbed = asyncio.run(ask_afresh(engine, [*calls, overdue]))
        assert any(choice["finish_reason"] == "stop" for answer in undisturbed for choice in answer.get("choices", {}).values())

        async def disturbed_run(killing: Callable[[Deltas], Coroutine[None, None, None]]) -> None:
            deltas = Deltas(seed=77)
            killer = asyncio.create_task(killing(deltas))
            while not killer.done():
                *found, cut = await ask_afresh(engine, [*calls, timed], deltas.note)
                for call, answer, expected in zip(calls, found, undisturbed, strict=False):
                    assert answer == expected, call
                whole = undisturbed[-1]["choices"][0]["text"]
                assert cut == undisturbed[-1] or cut["choices"][0]["finish_reason"] == "timeout"
                assert whole.startswith(cut["choices"][0]["text"].rstrip("\ufffd"))
            await killer

        asyncio.run(disturbed_run(lambda deltas: kill_in_turn(engine, deltas, PAIRS)))
        asyncio.run(disturbed_run(lambda deltas: kill_while_it_reloads(engine, deltas)))
        assert engine.metric("resubmissions_total") > 0
        assert engine.metric("spec_decode_num_accepted_tokens_total") > 0
        engine.wait_until_idle()


async def ask_afresh(engine: EngineProcess, calls: list[Call], on_delta: Callable[[], None] = lambda: None) -> list[Json]:
    """Send all at once with an empty prefix cache, so that usage has no cached tokens of an earlier run."""

    def is_empty() -> bool:
        url = f"{engine.url}/admin/reset_prefix_cache"
        return httpx.post(url, json={}, timeout=WATCHDOG_S, headers=OPERATOR).status_code == 200

    await asyncio.to_thread(wait_until, is_empty, what="the prefix cache is empty")
    return await ask_all(engine.url, calls, on_delta)


def test_killed_api_process_loses_only_its_requests() -> None:
    bodies = mixed_bodies(12, seed=6, max_tokens=400, max_prompt=60)
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

        # again where the first had ended before the last began, so that none was left to be cut; or all before another came
        for _ in range(10):
            results = asyncio.run(run_and_kill())
            cut = [result for result in results if isinstance(result, httpx.TransportError)]
            for result, expected in zip(results, undisturbed, strict=True):
                assert isinstance(result, httpx.TransportError) or result == expected
            engine.wait_until_idle()
            if cut and engine.metric("requests_aborted_total"):
                break
        assert 0 < len(cut) < len(bodies), "the kernel spreads connections over both api processes"
        assert engine.metric("requests_aborted_total") > 0
        assert answers(engine, bodies[:4]) == undisturbed[:4]


def test_a_hung_actor_is_replaced() -> None:
    """SIGSTOP is a hang: health names the actor, the supervisor replaces it, and the streams end as if undisturbed."""
    bodies = mixed_bodies(8, seed=7, max_tokens=200, max_prompt=40)
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
