"""Weights change in place under load; commands answer when done; invalid ones affect no request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from engine.messages import WeightsState
from tests.e2e.checkpoints import broken_missing, broken_shape, broken_truncated, other_weights
from tests.e2e.engine_process import DEMO, GOLDEN, OPERATOR, EngineProcess
from tests.e2e.workload import Answer, Body, answers, held, mixed_bodies, stream_all, stream_one, wait_for_waiting
from tests.ggufs import write
from tests.waiting import WATCHDOG_S, wait_until

MODEL_A = GOLDEN / "qwen2"
SHORT: list[Body] = mixed_bodies(12, seed=31, max_tokens=16, max_prompt=60)
# They run from the command until its answer; as each is long, few are enough.
LONG: list[Body] = mixed_bodies(3, seed=32, max_tokens=1500, max_prompt=60)


@pytest.fixture(scope="module")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(MODEL_A, tmp_path_factory.mktemp("weights") / "b")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL_A, "--max-model-len", "4000", "--restart-limit", "100") as running:
        yield running


@pytest.fixture(scope="module")
def truth(engine: EngineProcess, model_b: Path) -> dict[str, list[Answer]]:
    """Answers of A and B, each from a fresh start."""
    with EngineProcess(model_b, "--max-model-len", "4000") as fresh_b:
        return {"a": stripped(answers(engine, SHORT)), "b": stripped(answers(fresh_b, SHORT))}


def stripped(results: list[Answer]) -> list[Answer]:
    """Return answers without their weight version, which counts reloads."""
    for result in results:
        result.weight_version = ""
    return results


def order(engine: EngineProcess, name: str, /, **body: Any) -> httpx.Response:
    return httpx.post(f"{engine.url}/admin/{name}", json=body, timeout=WATCHDOG_S, headers=OPERATOR)


def reload(engine: EngineProcess, path: Path, **body: Any) -> int:
    """Reload and return the new version."""
    answer = order(engine, "reload", path=str(path), **body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["weight_version"])


@pytest.mark.parametrize(
    ("mode", "ranks"), [("requeue", []), ("wait", []), ("keep", [0])], ids=["requeue-all", "wait-all", "keep-one-rank"]
)
def test_reload_under_load(
    engine: EngineProcess, truth: dict[str, list[Answer]], model_b: Path, mode: str, ranks: list[int]
) -> None:
    """A to B while long streams run: none fails, later answers are B's, and versions tell them apart. Retried where all had
    ended before the command was carried out."""
    wait_until(lambda: outlast_a_reload(engine, truth, model_b, mode, ranks) or mode == "wait", what="streams with both")


def outlast_a_reload(engine: EngineProcess, truth: dict[str, list[Answer]], model_b: Path, mode: str, ranks: list[int]) -> bool:
    """Return whether a stream has tokens of A and of B."""
    before = reload(engine, MODEL_A)
    assert stripped(answers(engine, SHORT)) == truth["a"]
    bodies = [body | {"max_tokens": 120} for body in LONG] if mode == "wait" else LONG

    async def run() -> list[Answer]:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, bodies, len(bodies), flowing.set))
        await asyncio.wait_for(flowing.wait(), WATCHDOG_S)
        assert await asyncio.to_thread(reload, engine, model_b, mode=mode, ranks=ranks) == before + 1
        during = asyncio.to_thread(answers, engine, SHORT)
        assert stripped(await during) == truth["b"]
        return await streams

    results = asyncio.run(run())
    assert all(
        result.error is None and result.num_completion_tokens == body["max_tokens"]
        for result, body in zip(results, bodies, strict=True)
    )
    versions = {result.weight_version for result in results}
    assert versions <= {f"{before}", f"{before},{before + 1}", f"{before + 1}"}
    return f"{before},{before + 1}" in versions


def test_version_in_headers(engine: EngineProcess, model_b: Path) -> None:
    version = reload(engine, model_b)
    answer = httpx.post(f"{engine.url}/v1/completions", json=SHORT[0], timeout=WATCHDOG_S)
    assert answer.headers["x-tokamak-weight-version"] == str(version)
    assert answer.headers["x-request-id"]


def test_abort_mode_ends_running_requests(engine: EngineProcess) -> None:
    async def run() -> list[Answer]:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, LONG, len(LONG), flowing.set))
        await asyncio.wait_for(flowing.wait(), WATCHDOG_S)
        await asyncio.to_thread(reload, engine, MODEL_A, mode="abort")
        return await streams

    def are_cut() -> bool:
        """Return whether all that had not ended before are cut."""
        reasons = {result.finish_reason for result in asyncio.run(run())}
        assert reasons <= {"abort", "length"}
        return "abort" in reasons

    wait_until(are_cut, what="a stream is cut")
    engine.wait_until_idle()


@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (broken_missing, "model.layers.1.mlp.up_proj.weight"),
        (broken_truncated, "model.safetensors"),
        (broken_shape, "hidden_size"),
    ],
)
def test_broken_checkpoint_changes_nothing(
    engine: EngineProcess,
    truth: dict[str, list[Answer]],
    tmp_path: Path,
    break_it: Callable[[Path, Path], Path],
    cause: str,
) -> None:
    version = reload(engine, MODEL_A)
    answer = order(engine, "reload", path=str(break_it(MODEL_A, tmp_path / "broken")))
    assert 400 <= answer.status_code < 500
    assert cause in answer.text
    assert engine.metric("engine_weight_version") == version
    assert stripped(answers(engine, SHORT)) == truth["a"]
    assert order(engine, "reload", path="/no/such/place").status_code == 400
    assert order(engine, "reload", path=str(MODEL_A), ranks=[7]).status_code == 400
    assert order(engine, "reload", path=str(MODEL_A), mode="maybe").status_code == 400
    for ranks in ([0] * 300_000, list(range(1000)), list(range(1024, 2048)) * 2):
        assert order(engine, "reload", path=str(MODEL_A), ranks=ranks).status_code == 400
    assert order(engine, "reload", path="/" + "\U0001f600" * 4000).status_code == 400
    assert engine.is_healthy()


@contextlib.contextmanager
def written_meanwhile(path: Path) -> Iterator[None]:
    """Rewrite the file in another process within the block: it has half of its bytes, then all, again and again."""
    num_bytes, is_over = path.stat().st_size, threading.Event()
    data = path.read_bytes()[num_bytes // 2 :] if num_bytes < 1 << 24 else b""

    def write() -> None:
        with path.open("r+b") as file:
            while not is_over.is_set():
                file.truncate(num_bytes // 2)
                file.seek(num_bytes // 2)
                file.write(data)
                file.truncate(num_bytes)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        is_over.set()
        writer.join()


def test_reload_survives_a_file_being_written(engine: EngineProcess, truth: dict[str, list[Answer]], tmp_path: Path) -> None:
    """An unused tensor of 256 MiB makes reading take long enough; its second half comes and goes."""
    version = reload(engine, MODEL_A)
    epochs = {name: actor["epoch"] for name, actor in engine.actors().items()}
    path = shutil.copytree(MODEL_A, tmp_path / "growing") / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["model.mtp_unused"] = {"dtype": "U8", "shape": [1 << 28], "data_offsets": [len(tensors), len(tensors) + (1 << 28)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)
    os.truncate(path, path.stat().st_size + (1 << 28))
    with written_meanwhile(path):
        for _ in range(5):
            answer = order(engine, "reload", path=str(path.parent))
            assert answer.status_code == 400, answer.text
            assert str(path) in answer.text
    assert engine.metric("engine_weight_version") == version
    assert stripped(answers(engine, SHORT)) == truth["a"]
    assert {name: actor["epoch"] for name, actor in engine.actors().items()} == epochs


def test_reload_survives_a_gguf_being_written(engine: EngineProcess, truth: dict[str, list[Answer]], tmp_path: Path) -> None:
    reload(engine, MODEL_A)
    epochs = {name: actor["epoch"] for name, actor in engine.actors().items()}
    path = tmp_path / "growing.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(100_000)])
    write(writer)
    with written_meanwhile(path):
        for _ in range(10):
            answer = order(engine, "reload", path=str(path))
            assert answer.status_code == 400, answer.text
            assert str(path) in answer.text
    assert stripped(answers(engine, SHORT)) == truth["a"]
    assert {name: actor["epoch"] for name, actor in engine.actors().items()} == epochs


@pytest.mark.parametrize(("down", "up"), [("pause", "resume"), ("sleep", "wake"), ("clear_weights", "reload")])
def test_states(engine: EngineProcess, truth: dict[str, list[Answer]], down: str, up: str) -> None:
    """Nothing runs or waits after the command; new requests are held, then served; an illegal command is a 409."""
    reload(engine, MODEL_A)

    async def run() -> list[Answer]:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, LONG, len(LONG), flowing.set))
        await asyncio.wait_for(flowing.wait(), WATCHDOG_S)
        answer = await asyncio.to_thread(order, engine, down)
        assert answer.status_code == 200, answer.text
        await asyncio.to_thread(engine.wait_until_idle)
        return await streams

    assert {result.finish_reason for result in asyncio.run(run())} <= {"abort", "length"}
    again = order(engine, "pause")
    assert again.status_code == 409
    assert ("cleared" if down != "pause" else "paused") in again.text.lower()

    assert stripped(asyncio.run(released(engine, up))) == truth["a"]
    assert order(engine, "resume").status_code == 409


def is_back(engine: EngineProcess, actor: str, old_epoch: int) -> bool:
    """Return whether the actor was restarted and takes work, whatever the engine's state."""
    row = engine.actors().get(actor)
    return row is not None and int(row["epoch"]) > old_epoch and row["state"] in ("READY", "RUNNING")


async def released(engine: EngineProcess, up: str, *deaths: str) -> list[Answer]:
    """Hold new requests while nothing runs, across deaths, until the command `up`."""
    streams = asyncio.create_task(stream_all(engine.url, SHORT, 12))
    await asyncio.to_thread(wait_for_waiting, engine, len(SHORT))
    for actor in deaths:
        epoch = engine.kill(actor)
        await asyncio.to_thread(wait_until, partial(is_back, engine, actor, epoch), what=f"{actor} restarted")
    await asyncio.to_thread(wait_for_waiting, engine, len(SHORT))
    assert engine.metric("num_requests_running") == 0
    answer = await asyncio.to_thread(order, engine, up)
    assert answer.status_code == 200, answer.text
    return await streams


def test_a_pause_and_a_reload_outlast_every_death(engine: EngineProcess, truth: dict[str, list[Answer]], model_b: Path) -> None:
    reload(engine, MODEL_A)
    assert order(engine, "pause").status_code == 200
    version = reload(engine, model_b)
    deaths = ("scheduler", "worker0", "tokenizer0", "cache")
    assert stripped(asyncio.run(released(engine, "resume", *deaths))) == truth["b"]
    assert engine.metric("engine_weight_version") == version


@pytest.mark.parametrize("actor", ["scheduler", "worker0"])
def test_death_during_a_reload(engine: EngineProcess, truth: dict[str, list[Answer]], model_b: Path, actor: str) -> None:
    """Answers are of before or after, as the version says; the failed version is not used again."""
    before = reload(engine, model_b)

    async def run() -> httpx.Response:
        asked = asyncio.create_task(asyncio.to_thread(order, engine, "reload", path=str(MODEL_A)))
        await asyncio.to_thread(wait_until, lambda: asked.done() or engine.metric("engine_state") == 3, what="it loads")
        await asyncio.to_thread(engine.wait_for_restart, actor, engine.kill(actor))
        return await asked

    answer = asyncio.run(run())
    assert answer.status_code in (200, 503)
    found = stripped(answers(engine, SHORT))
    version = engine.metric("engine_weight_version")
    assert version in ([before + 1] if answer.status_code == 200 else [before, before + 1])
    assert found == truth["b" if version == before else "a"]
    assert reload(engine, MODEL_A) == before + 2


def test_a_deadline_passes_in_a_pause(engine: EngineProcess) -> None:
    """The answer is the text until then. The pause comes in its middle, so no machine is fast enough to end it before."""
    whole = answers(engine, LONG[:1])[0].token_ids

    async def cut_after(timeout_s: float) -> Answer:
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S) as client:
            flowing = asyncio.Event()
            stream = asyncio.create_task(stream_one(client, LONG[0] | {"timeout": timeout_s}, flowing.set))
            stream.add_done_callback(lambda _: flowing.set())  # a slow machine may not even begin
            await asyncio.wait_for(flowing.wait(), WATCHDOG_S)
            async with held(engine, "keep"):
                return await asyncio.wait_for(stream, timeout_s + WATCHDOG_S)

    def is_cut(timeout_s: float) -> bool:
        cut = asyncio.run(cut_after(timeout_s))
        assert (cut.error, cut.token_ids) == (None, whole[: len(cut.token_ids)])
        assert cut.finish_reason == ("timeout" if len(cut.token_ids) < len(whole) else "length")
        return 0 < len(cut.token_ids) < len(whole)

    assert any(is_cut(0.5 * 2**tries) for tries in range(7))


def test_restarted_worker_loads_weights_in_use(engine: EngineProcess, truth: dict[str, list[Answer]], model_b: Path) -> None:
    version = reload(engine, model_b)
    epoch = engine.kill("worker0")
    engine.wait_for_restart("worker0", epoch)
    assert stripped(answers(engine, SHORT)) == truth["b"]
    assert engine.metric("engine_weight_version") == version


@pytest.mark.parametrize("cache", ["kept", "not-kept"])
def test_checkpoint_is_overwritten(truth: dict[str, list[Answer]], model_b: Path, tmp_path: Path, cache: str) -> None:
    """A worker that dies comes back with the weights in use, from its packed weights. Without these, the files' new contents
    get a version of their own, and no prefix-cache hit mixes the two."""
    model = Path(shutil.copytree(MODEL_A, tmp_path / "model"))
    with EngineProcess(model, "--max-model-len", "4000", *(["--no-weight-cache"] if cache == "not-kept" else [])) as engine:
        assert stripped(answers(engine, SHORT)) == truth["a"]
        (model / "model.safetensors").write_bytes((model_b / "model.safetensors").read_bytes())
        engine.wait_for_restart("worker0", engine.kill("worker0"))
        found = answers(engine, SHORT)
        assert {answer.weight_version for answer in found} == {"1" if cache == "kept" else "2"}
        assert stripped(found) == truth["a" if cache == "kept" else "b"]
        assert reload(engine, model) == (2 if cache == "kept" else 3)
        assert stripped(answers(engine, SHORT)) == truth["b"]


TEXTS: list[Body] = [{"prompt": text, "max_tokens": 8, "temperature": 0} for text in ("The quick brown fox", "naïve 😀")]


def write_over(directory: Path, source: Path) -> None:
    """Overwrite each file in place: processes that have it open see the new bytes."""
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())


def restart_all(engine: EngineProcess) -> None:
    for actor in ("worker0", "tokenizer0", "scheduler", "api0"):
        engine.wait_for_restart(actor, engine.kill(actor))


def test_engine_keeps_the_model_of_its_start(truth: dict[str, list[Answer]], model_b: Path, tmp_path: Path) -> None:
    """The directory is overwritten with a model of another shape and vocabulary, then removed: restarted actors serve the
    original model, also after a reload from elsewhere."""
    model = Path(shutil.copytree(MODEL_A, tmp_path / "model"))
    with EngineProcess(model, "--max-model-len", "4000", "--restart-limit", "100") as engine:
        texts = answers(engine, TEXTS)
        write_over(model, DEMO)
        restart_all(engine)
        assert (stripped(answers(engine, SHORT)), answers(engine, TEXTS)) == (truth["a"], texts)
        refused = order(engine, "reload")
        assert (refused.status_code, "not the model that the engine was started with" in refused.text) == (400, True)
        reload(engine, model_b)
        shutil.rmtree(model)
        restart_all(engine)
        assert stripped(answers(engine, SHORT)) == truth["b"]


def test_no_weights_are_left(truth: dict[str, list[Answer]], model_b: Path, tmp_path: Path) -> None:
    """The weights in use are gone everywhere, though those of the start exist: a worker that dies comes back without any,
    /health says so, and it can load others."""
    other = Path(shutil.copytree(model_b, tmp_path / "other"))
    with EngineProcess(MODEL_A, "--max-model-len", "4000", "--no-weight-cache", "--restart-limit", "2") as engine:
        reload(engine, other)
        shutil.rmtree(other)
        epoch = engine.kill("worker0")
        wait_until(partial(is_back, engine, "worker0", epoch), what="worker0 restarted")
        wait_until(lambda: engine.metric("engine_state") == WeightsState.CLEARED, what="without weights")
        assert "reload others" in httpx.get(f"{engine.url}/health", timeout=WATCHDOG_S).json()["reason"]
        reload(engine, model_b)
        assert stripped(answers(engine, SHORT)) == truth["b"]


def test_restart_by_command_is_no_crash(engine: EngineProcess, truth: dict[str, list[Answer]]) -> None:
    reload(engine, MODEL_A)
    for actor in ("worker0", "scheduler", "tokenizer0", "cache"):
        epoch = int(engine.actors()[actor]["epoch"])
        answer = order(engine, f"actors/{actor}/restart")
        assert answer.status_code == 200, answer.text
        assert int(engine.actors()[actor]["epoch"]) > epoch
        assert stripped(answers(engine, SHORT)) == truth["a"]
    assert order(engine, "actors/nobody9/restart").status_code == 404
    epoch = int(engine.actors()["api0"]["epoch"])
    answer = order(engine, "actors/api0/restart")  # it answers itself, before it ends
    assert (answer.status_code, "api0" in answer.text) == (202, True)
    engine.wait_for_restart("api0", epoch)
    assert stripped(answers(engine, SHORT)) == truth["a"]


def test_reset_prefix_cache(engine: EngineProcess) -> None:
    answers(engine, SHORT)
    assert engine.metric("num_cached_kv_blocks") > 0
    assert order(engine, "reset_prefix_cache").status_code == 200
    assert engine.metric("num_cached_kv_blocks") == 0


def test_abort_by_request_id(engine: EngineProcess) -> None:
    async def run() -> tuple[int, str | None]:
        flowing = asyncio.Event()
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S, headers={"x-request-id": "abort-me"}) as client:
            stream = asyncio.create_task(stream_one(client, LONG[0], flowing.set))
            await asyncio.wait_for(flowing.wait(), WATCHDOG_S)
            answer = await asyncio.to_thread(order, engine, "abort", request_id="abort-me")
            return answer.status_code, (await stream).finish_reason

    def is_cut() -> bool:
        """Return whether the answer was cut, which it is unless it had ended before."""
        status, reason = asyncio.run(run())
        assert (status, reason) in ((200, "abort"), (200, "length"), (404, "length"))
        return reason == "abort"

    wait_until(is_cut, what="it is aborted")
    assert order(engine, "abort", request_id="nobody").status_code == 404
