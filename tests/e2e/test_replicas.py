"""Two replicas in one engine: prompts are routed to cached prefixes, commands apply to both, and one dies without affecting the
other. The tests share an engine; their leftovers in the prefix caches do not matter.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.messages import WeightsState
from engine.process.run_directory import root_lock, runs_root
from engine.supervisor.reaper import reap
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess, leftovers
from tests.e2e.test_chaos import Deltas, kill_in_turn, order_reload, wait_for_503
from tests.e2e.workload import Answer, Body, answers, mixed_bodies, stream_all, stream_one
from tests.engine.echo_engine import is_clean, is_gone
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--data-parallel-size", "2", "--max-model-len", "1200", "--restart-limit", "100")
VICTIMS = ("scheduler0", "cache1", "worker1", "tokenizer0", "scheduler1")
BODIES = mixed_bodies(8, seed=9, max_tokens=500, max_prompt=150)
PINNED = "x-data-parallel-rank"


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL, *OPTIONS) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(engine: EngineProcess) -> list[Answer]:
    """Answers of whichever replica (`test_identity.py` compares with one)."""
    return answers(engine, BODIES)


def ask(engine: EngineProcess, body: Body, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{engine.url}/v1/completions", json=body, headers={PINNED: headers["replica"]} if headers else {}, timeout=WATCHDOG_S
    )


def client_of(engine: EngineProcess, replica: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=engine.url, timeout=2 * WATCHDOG_S, headers={PINNED: str(replica)})


def replica_of(answer: httpx.Response) -> str:
    answer.raise_for_status()
    return str(answer.headers["x-tokamak-replica"])


def gauges(engine: EngineProcess, name: str) -> list[float]:
    return [engine.metric(name, actor=f"scheduler{replica}") for replica in range(2)]


def content(answer: Answer) -> tuple[list[int], list[float], str, str | None]:
    """Return the answers without the weight version, which the tests change."""
    return answer.token_ids, answer.token_logprobs, answer.text, answer.finish_reason


def wait_for_epoch(engine: EngineProcess, actor: str, epoch: int) -> None:
    def is_back() -> bool:
        row = engine.actors().get(actor, {"epoch": 0})
        return int(row["epoch"]) >= epoch and row["state"] in ("READY", "RUNNING")

    wait_until(is_back, what=f"{actor} with epoch {epoch}")


def num_open(engine: EngineProcess) -> list[float]:
    both = zip(gauges(engine, "num_requests_running"), gauges(engine, "num_requests_waiting"), strict=True)
    return [sum(numbers) for numbers in both]


def order(engine: EngineProcess, path: str, /, **body: Any) -> httpx.Response:
    return httpx.post(f"{engine.url}/admin/{path}", json=body, headers=OPERATOR, timeout=WATCHDOG_S)


def test_prompt_is_routed_to_its_cached_prefix(engine: EngineProcess) -> None:
    """Prompts with 16 beginnings go to both replicas, and those with the same beginning to the same one."""
    beginnings = [[10 + number] * 64 for number in range(16)]
    before, num_events = engine.metric("requests_routed_total", reason="prefix"), engine.metric("kv_events_total")
    homes = [replica_of(ask(engine, {"prompt": [*beginning, 3], "max_tokens": 1})) for beginning in beginnings]
    assert set(homes) == {"0", "1"}
    wait_until(lambda: engine.metric("kv_events_total") >= num_events + len(homes), what="the cache actors know them all")
    for beginning, home in zip(beginnings, homes, strict=True):
        answer = ask(engine, {"prompt": [*beginning, 4], "max_tokens": 1})
        assert replica_of(answer) == home
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert engine.metric("requests_routed_total", reason="prefix") - before == 16


def test_a_client_chooses_its_replica(engine: EngineProcess) -> None:
    bodies = [{"prompt": [[7, 8], [9, 10, 11]], "max_tokens": 2, "n": 2, "temperature": 0}, {"prompt": [7], "max_tokens": 2}]
    for replica in ("0", "1"):
        assert [replica_of(ask(engine, body, replica=replica)) for body in bodies] == [replica] * 2
    for wrong in ("2", "-1", "01", "one", ""):
        answer = ask(engine, bodies[1], replica=wrong)
        assert answer.status_code == 400, wrong
        assert "the replicas are 0 to 1" in answer.json()["error"]["message"]


def test_sequences_of_a_prompt_stay_together(engine: EngineProcess) -> None:
    before = engine.metric("requests_routed_total", reason="group")
    assert replica_of(ask(engine, {"prompt": [77] * 40, "max_tokens": 4, "n": 8})) in ("0", "1")
    assert engine.metric("requests_routed_total", reason="group") - before == 7


def test_load_is_shown_for_each_replica(engine: EngineProcess) -> None:
    assert {row["state"] for row in engine.actors().values()} <= {"READY", "RUNNING"}  # all were waited for
    engine.wait_until_idle()  # blocks of an answered request are freed with the step in flight
    load = httpx.get(f"{engine.url}/load", timeout=WATCHDOG_S).json()
    assert [each["replica"] for each in load["replicas"]] == [0, 1]
    assert all(each["free_slots"] == each["max_num_seqs"] and each["tokens_to_compute"] == 0 for each in load["replicas"])
    assert all(each["free_kv_blocks"] == each["kv_blocks"] > 0 for each in load["replicas"])


def test_commands_apply_to_both(engine: EngineProcess, undisturbed: list[Answer]) -> None:
    assert order(engine, "pause").json()["state"] == "PAUSED"
    assert gauges(engine, "engine_state") == [WeightsState.PAUSED] * 2
    refused = order(engine, "pause")
    assert (refused.status_code, "PAUSED" in refused.text) == (409, True)
    assert order(engine, "resume").json()["state"] == "NORMAL"
    version = gauges(engine, "engine_weight_version")[0]
    assert order(engine, "reload").json()["weight_version"] == version + 1
    assert order(engine, "sleep").status_code == 200
    assert gauges(engine, "engine_state") == [WeightsState.CLEARED] * 2
    assert order(engine, "wake").status_code == 200
    assert order(engine, "reload", ranks=[1]).json()["weight_version"] == version + 2
    assert gauges(engine, "engine_weight_version") == [version + 1, version + 2]
    assert order(engine, "reload", ranks=[2]).status_code == 400
    assert order(engine, "reload").json()["weight_version"] == version + 3
    assert gauges(engine, "engine_weight_version") == [version + 3] * 2
    assert order(engine, "reset_prefix_cache").status_code == 200
    found = answers(engine, BODIES)
    assert {answer.weight_version for answer in found} == {f"{version + 3:g}"}
    assert list(map(content, found)) == list(map(content, undisturbed))


def test_reload_that_fails_in_one_replica_is_undone(engine: EngineProcess) -> None:
    """Replica 0 has loaded when the scheduler of replica 1 dies, while its rank does not answer."""
    version = gauges(engine, "engine_weight_version")[0]
    worker = engine.actors()["worker1"]
    engine.kill("worker1", signal.SIGSTOP)

    async def reload_and_kill() -> httpx.Response:
        reload = asyncio.create_task(asyncio.to_thread(order, engine, "reload"))
        loaded = [version + 1, version]
        await asyncio.to_thread(
            wait_until, lambda: gauges(engine, "engine_weight_version") == loaded, what="replica 0 has loaded"
        )
        await asyncio.to_thread(wait_until, lambda: gauges(engine, "engine_state")[1] == WeightsState.LOADING, what="1 loads")
        epoch = await asyncio.to_thread(engine.kill, "scheduler1")
        await asyncio.to_thread(engine.kill, "worker1", signal.SIGCONT)
        await asyncio.to_thread(engine.wait_for_restart, "scheduler1", epoch)
        return await reload

    answer = asyncio.run(reload_and_kill())
    assert answer.status_code == 503
    assert "the command was interrupted: scheduler1 died" in answer.text
    assert "scheduler0 rolled back" in answer.text

    def is_as_before() -> bool:
        return (
            gauges(engine, "engine_weight_version") == [version] * 2
            and gauges(engine, "engine_state") == [WeightsState.NORMAL] * 2
        )

    wait_until(is_as_before, what="both are as before")
    assert engine.actors()["worker1"]["epoch"] == worker["epoch"]
    for replica in ("0", "1"):
        assert ask(engine, BODIES[0] | {"max_tokens": 2}, replica=replica).json()["weight_version"] == f"{version:g}"
    assert order_reload(engine, "requeue") == 200
    assert gauges(engine, "engine_weight_version") == [version + 2] * 2  # the number that failed is never used again


def test_death_of_one_replica_spares_the_other(engine: EngineProcess, undisturbed: list[Answer]) -> None:
    """The rank of one hangs, its cache actor dies, and nothing is submitted again. Its scheduler hangs too, and the other
    replica answers, also requests that name none; /health says what is missing. When it is replaced, only its own sequences are
    submitted again."""
    resubmissions = engine.metric("resubmissions_total")
    engine.kill("worker1", signal.SIGSTOP)

    async def run_and_kill() -> None:
        async with client_of(engine, 0) as first, client_of(engine, 1) as second:
            held_up = [asyncio.create_task(stream_one(second, body)) for body in BODIES[1::2]]
            await asyncio.to_thread(wait_until, lambda: num_open(engine) == [0, len(held_up)], what="they are there")
            epoch = await asyncio.to_thread(engine.kill, "cache1")
            await asyncio.to_thread(wait_for_epoch, engine, "cache1", epoch + 1)
            assert engine.metric("resubmissions_total") == resubmissions
            epoch = await asyncio.to_thread(engine.kill, "scheduler1", signal.SIGSTOP)
            others = await asyncio.gather(*(stream_one(first, body) for body in BODIES[::2]))
            assert list(map(content, others)) == list(map(content, undisturbed[::2]))
            new = await asyncio.to_thread(ask, engine, {"prompt": [5] * 20, "max_tokens": 1})
            assert replica_of(new) == "0"
            await asyncio.to_thread(wait_for_503, engine, "scheduler1")
            await asyncio.to_thread(engine.kill, "worker0", signal.SIGSTOP)
            other = asyncio.create_task(stream_one(first, BODIES[0]))
            await asyncio.to_thread(wait_until, lambda: num_open(engine)[0] == 1, what="it is scheduled, which its api hears")
            (await first.post("/tokenize", json={"prompt": "behind it"})).raise_for_status()  # so that it has heard by now
            await asyncio.to_thread(engine.kill, "scheduler1", signal.SIGKILL)
            for worker in ("worker0", "worker1"):
                await asyncio.to_thread(engine.kill, worker, signal.SIGCONT)
            await asyncio.to_thread(engine.wait_for_restart, "scheduler1", epoch)
            found = await asyncio.gather(*held_up, other)
            assert list(map(content, found)) == list(map(content, [*undisturbed[1::2], undisturbed[0]]))
            assert engine.metric("resubmissions_total") - resubmissions == len(held_up)

    asyncio.run(run_and_kill())
    engine.wait_until_idle()


@pytest.mark.timeout(600)
def test_streams_survive_every_kill(engine: EngineProcess, undisturbed: list[Answer]) -> None:
    expected = list(map(content, undisturbed))

    async def disturbed_run() -> None:
        deltas = Deltas(seed=78)
        killer = asyncio.create_task(kill_in_turn(engine, deltas, [(victim,) for victim in VICTIMS]))
        while not killer.done():
            found = await stream_all(engine.url, BODIES, len(BODIES), deltas.note)
            assert list(map(content, found)) == expected
        await killer

    asyncio.run(disturbed_run())
    engine.wait_until_idle()


def test_requests_of_a_dead_api_process_are_dropped(engine: EngineProcess) -> None:
    async def run_and_kill() -> None:
        async with client_of(engine, 0) as first, client_of(engine, 1) as second:
            streams = [
                asyncio.create_task(stream_one(client, body)) for body, client in zip(BODIES, [first, second] * 4, strict=True)
            ]
            await asyncio.to_thread(wait_until, lambda: num_open(engine) == [len(BODIES) // 2] * 2, what="they wait")
            epoch = await asyncio.to_thread(engine.kill, "api0")
            cut = await asyncio.gather(*streams, return_exceptions=True)
            assert all(isinstance(answer, httpx.TransportError) for answer in cut)
            await asyncio.to_thread(wait_for_epoch, engine, "api0", epoch + 1)

    assert order(engine, "pause").status_code == 200
    asyncio.run(run_and_kill())
    engine.wait_until_idle()
    assert order(engine, "resume").status_code == 200


def test_killed_supervisor_leaves_nothing(engine: EngineProcess) -> None:
    """The last test: the next start removes the remains of the shared engine."""
    pids = [int(actor["pid"]) for actor in engine.actors().values()]
    assert len(pids) == 9
    run = engine.run
    engine.close()
    wait_until(lambda: all(map(is_gone, pids)), what="its processes end with it")
    with root_lock(runs_root()):
        reap(runs_root())
    assert is_clean(run)
    assert leftovers(pids) == []
