"""Orders to a router go to all of its engines, one after the other, and are taken back when one fails. The tests share a router
and two engines; each leaves the first weights behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.e2e.checkpoints import broken_missing, other_weights
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.router_process import Cluster
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
BODIES = mixed_bodies(6, seed=41, max_tokens=40, max_prompt=60)
ADAPTERS = ("a0", "a1", "hidden")
LONG = mixed_bodies(6, seed=42, max_tokens=1000, max_prompt=60)


class Weights:
    """Directories that the engines may load from, and the answers of each model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.other = other_weights(MODEL, directory / "other")
        self.broken = broken_missing(MODEL, directory / "broken")
        self.of_one_engine = other_weights(MODEL, directory / "private" / "other")
        self.answers: dict[str, list[Answer]] = {}
        for number, name in enumerate(ADAPTERS):
            write_adapter(directory / "private" / name if name == "hidden" else directory / name, MODEL, seed=number)
        write_adapter(directory / "large", MODEL, rank=17)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    directory = tmp_path_factory.mktemp("weights")
    (directory / "private").mkdir()
    return Weights(directory)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Iterator[Cluster]:
    options = ("--max-model-len", "1200", "--restart-limit", "100", "--threads", "1", "--enable-lora")
    found = Cluster(tmp_path_factory.mktemp("cluster"), MODEL, *options)
    shared = ",".join(map(str, [GOLDEN, *(weights.directory / name for name in ("other", "broken", "a0", "a1", "large"))]))
    found.engines[0].command += ["--cluster-checkpoints", f"{shared},{weights.directory}"]
    found.engines[0].command += ["--lora-modules", f"a0={weights.directory / 'a0'}"]
    found.engines[1].command += ["--cluster-checkpoints", shared]
    with found:
        weights.answers["first"] = answers(found.router, BODIES)
        yield found


def order(cluster: Cluster, name: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{cluster.router.url}/admin/{name}", json=body, headers=OPERATOR, timeout=WATCHDOG_S)


def contents(found: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.text) for answer in found]


def have_first(cluster: Cluster, weights: Weights) -> bool:
    """Return whether each engine answers with the first weights."""
    return all(contents(answers(engine, BODIES)) == contents(weights.answers["first"]) for engine in cluster.engines)


async def while_streaming(cluster: Cluster, name: str, **body: Any) -> tuple[httpx.Response, list[Answer]]:
    """Give an order as soon as long streams run; return its answer and theirs."""
    arrived = asyncio.Semaphore(0)
    running = asyncio.create_task(stream_all(cluster.router.url, LONG, len(LONG), arrived.release))
    for _ in LONG:
        await asyncio.wait_for(arrived.acquire(), WATCHDOG_S)
    answer = await asyncio.to_thread(lambda: order(cluster, name, **body))
    return answer, await running


def test_reload_under_streams(cluster: Cluster, weights: Weights) -> None:
    """Both engines get the weights. A stream stays with its weights as long as an engine has them."""
    answer, streams = asyncio.run(while_streaming(cluster, "reload", path=str(weights.other)))
    assert answer.status_code == 200, answer.text
    found = answer.json()["engines"]
    assert [(each["engine"], each["status"]) for each in found] == [(address, 200) for address in cluster.addresses]
    cluster.wait_for(2)
    others = answers(cluster.router, BODIES)
    (number,) = {each.weight_version for each in others}
    assert {stream.weight_version for stream in streams} <= {"1", number, f"1,{number}"}
    assert contents(others) != contents(weights.answers["first"])
    assert all(contents(answers(engine, BODIES)) == contents(others) for engine in cluster.engines)
    assert order(cluster, "reload", path=str(MODEL)).status_code == 200
    cluster.wait_for(2)
    found = answers(cluster.router, BODIES)
    assert contents(found) == contents(weights.answers["first"])
    assert {each.weight_version for each in found} == {"1"}  # each engine counts one more
    fingerprints = {
        httpx.post(f"{url}/v1/completions", json=BODIES[0] | {"stream": False}, timeout=WATCHDOG_S).json()["system_fingerprint"]
        for url in (cluster.router.url, *(engine.url for engine in cluster.engines))
    }
    assert len(fingerprints) == 1


@pytest.mark.parametrize("name", ["broken", "of_one_engine", "missing", "elsewhere", "relative"])
def test_reload_that_fails_is_taken_back(cluster: Cluster, weights: Weights, name: str) -> None:
    """One engine cannot load them, or no engine can: all have the first weights afterwards."""
    path = {"missing": "/missing", "elsewhere": str(weights.directory.parent), "relative": "qwen3"}.get(name)
    answer = order(cluster, "reload", path=path or str(getattr(weights, name)))
    assert 400 <= answer.status_code < 500, answer.text
    assert ("took it back" in answer.text) == (name == "of_one_engine"), answer.text
    cluster.wait_for(2)
    assert have_first(cluster, weights)


@pytest.mark.parametrize(("index", "actor"), [(-1, "link"), (0, "link"), (1, "link"), (1, "scheduler"), (0, "worker0")])
def test_kill_in_a_reload(cluster: Cluster, weights: Weights, index: int, actor: str) -> None:
    """Whichever process dies, all engines have the weights from before or all have those from after, as the answer says."""

    async def run() -> httpx.Response:
        giving = asyncio.create_task(while_streaming(cluster, "reload", path=str(weights.other), mode="wait"))
        victim = cluster.engines[index] if index >= 0 else cluster.router
        while not giving.done() and not await asyncio.to_thread(cluster.router.metric, "orders_in_progress"):
            await asyncio.sleep(0.02)  # it may be over soon
        epoch = await asyncio.to_thread(victim.kill, actor, signal.SIGKILL)
        await asyncio.to_thread(victim.wait_for_restart, actor, epoch)
        answer, streams = await giving
        assert all(stream.finish_reason == "length" for stream in streams)
        return answer

    answer = asyncio.run(run())
    wait_until(lambda: cluster.router.metric("orders_in_progress") == 0, what="it is over")
    cluster.wait_for(2)
    if answer.status_code == 200:
        first, second = (contents(answers(engine, BODIES)) for engine in cluster.engines)
        assert first == second != contents(weights.answers["first"])
        assert order(cluster, "reload", path=str(MODEL)).status_code == 200
        cluster.wait_for(2)
    else:
        assert answer.status_code == 503, answer.text
    assert have_first(cluster, weights)


def adapters_of(process: EngineProcess) -> set[str]:
    cards = httpx.get(f"{process.url}/v1/models", timeout=WATCHDOG_S).json()["data"]
    return {card["id"] for card in cards} & {*ADAPTERS, "large"}


def with_adapter(process: EngineProcess, name: str) -> list[tuple[list[int], str]]:
    return contents(answers(process, [body | {"model": name} for body in BODIES]))


def test_adapter_that_one_engine_had(cluster: Cluster) -> None:
    """The router serves the adapter of the first engine; the other one has loaded it before its first request."""
    everyone = [cluster.router, *cluster.engines]
    assert [adapters_of(process) for process in everyone] == [{"a0"}] * 3
    first, *others = [with_adapter(process, "a0") for process in everyone]
    assert [first] * 2 == others != [contents(answers(cluster.router, BODIES))] * 2


def test_adapters_are_loaded_everywhere_or_nowhere(cluster: Cluster, weights: Weights) -> None:
    everyone = [cluster.router, *cluster.engines]
    directory = weights.directory
    for name, path, status in (("large", directory / "large", 400), ("hidden", directory / "private" / "hidden", 403)):
        answer = order(cluster, "../v1/load_lora_adapter", lora_name=name, lora_path=str(path))
        assert answer.status_code == status, answer.text
        assert [adapters_of(process) for process in everyone] == [{"a0"}] * 3
    answer = order(cluster, "../v1/load_lora_adapter", lora_name="a1", lora_path=str(directory / "a1"))
    assert answer.status_code == 200, answer.text
    assert [adapters_of(process) for process in everyone] == [{"a0", "a1"}] * 3
    first, *others = [with_adapter(process, "a1") for process in everyone]
    assert [first] * 2 == others
    assert order(cluster, "../v1/unload_lora_adapter", lora_name="a1").status_code == 200
    assert [adapters_of(process) for process in everyone] == [{"a0"}] * 3


@pytest.mark.parametrize(("index", "actor"), [(-1, "link"), (0, "link"), (1, "worker0")])
def test_kill_while_an_adapter_is_loaded(cluster: Cluster, weights: Weights, index: int, actor: str) -> None:
    everyone = [cluster.router, *cluster.engines]
    victim = cluster.engines[index] if index >= 0 else cluster.router
    with ThreadPoolExecutor() as pool:
        path = str(weights.directory / "a1")
        giving = pool.submit(lambda: order(cluster, "../v1/load_lora_adapter", lora_name="a1", lora_path=path))
        victim.wait_for_restart(actor, victim.kill(actor, signal.SIGKILL))
        answer = giving.result()
    wait_until(lambda: cluster.router.metric("orders_in_progress") == 0, what="it is over")
    cluster.wait_for(2)
    expected = {"a0", "a1"} if answer.status_code == 200 else {"a0"}
    wait_until(lambda: [adapters_of(process) for process in everyone] == [expected] * 3, what=f"all have {expected}")
    if answer.status_code == 200:
        assert order(cluster, "../v1/unload_lora_adapter", lora_name="a1").status_code == 200


def test_other_orders(cluster: Cluster) -> None:
    assert order(cluster, "pause").status_code == 200
    assert [engine.metric("engine_state") for engine in cluster.engines] == [1, 1]
    assert order(cluster, "resume").status_code == 200
    assert [engine.metric("engine_state") for engine in cluster.engines] == [0, 0]
    assert order(cluster, "reset_prefix_cache").status_code == 200
    assert order(cluster, "abort", request_id="unknown").status_code == 404
    assert order(cluster, "reload", ranks=[0]).status_code == 400


def test_damaged_record_of_an_order_stops_no_link(cluster: Cluster) -> None:
    path = cluster.router.run.directory / "order.json"
    path.write_bytes(b'{"command": {"command_')
    asyncio.run(cluster.kill(-1, "link"))
    assert "cannot read" in cluster.router.ctl("errors")
    assert not path.exists()


def test_absent_engine(cluster: Cluster) -> None:
    """An order that would make engines differ waits for none that is away."""
    cluster.router.write([*cluster.addresses, "127.0.0.1:9"])
    try:
        wait_until(lambda: cluster.router.metric("router_engines", state="gone") == 1, what="the list is read")
        answer = order(cluster, "reload")
        assert (answer.status_code, "127.0.0.1:9" in answer.text) == (503, True)
        assert order(cluster, "reset_prefix_cache").status_code == 200
    finally:
        cluster.router.write(cluster.addresses)
        wait_until(lambda: cluster.router.metric("router_engines", state="gone") == 0, what="the list is read")


def test_engine_with_other_weights_gets_nothing_new(cluster: Cluster, weights: Weights) -> None:
    """Its operator changed them. It is used again when it has the others' weights."""
    engine = cluster.engines[1]
    body = {"path": str(weights.other)}
    assert httpx.post(f"{engine.url}/admin/reload", json=body, headers=OPERATOR, timeout=WATCHDOG_S).status_code == 200
    wait_until(lambda: "other weights than the others" in cluster.router.text, what="the router says so")
    assert contents(answers(cluster.router, BODIES)) == contents(weights.answers["first"])
    assert order(cluster, "reload", path=str(MODEL)).status_code == 200
    cluster.wait_for(2)
    assert have_first(cluster, weights)
