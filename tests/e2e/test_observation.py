"""Observation from outside: health, metrics, `tokamak top` and `ctl` on running and dead engines, KV events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import zmq

from tests.e2e.engine_process import GOLDEN, OPERATOR, REPOSITORY, EngineProcess, leftovers
from tests.e2e.workload import answers, mixed_bodies
from tests.engine.echo_engine import is_gone
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
BODIES = mixed_bodies(8, seed=51, max_tokens=24, max_prompt=60)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL, "--max-model-len", "400", "--log-level", "info", "--restart-limit", "100") as running:
        yield running


def tokamak(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=WATCHDOG_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_actor_is_seen(engine: EngineProcess) -> None:
    answers(engine, BODIES)
    run = ("--run", engine.run.run_id)
    assert "worker0" in json.dumps(json.loads(tokamak("top", *run, "--json")))
    for view in (tokamak("top", *run, "--once"), tokamak("ctl", *run, "ps")):
        for actor in ("supervisor", "api0", "tokenizer0", "scheduler", "cache", "worker0"):
            assert actor in view
    assert "num_requests_running" in tokamak("ctl", *run, "counters")
    tokamak("ctl", *run, "errors")
    load = ("--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--ignore-eos", "--warmup", "0", "--output", "-")
    assert json.loads(tokamak("bench", "serve", *run, *load))["settings"]["url"] == engine.url


def test_metrics_count(engine: EngineProcess) -> None:
    before = engine.metric("generation_tokens_total"), engine.metric("request_success_total", finished_reason="length")
    answers(engine, BODIES)
    assert engine.metric("generation_tokens_total") - before[0] == 24 * len(BODIES)
    assert engine.metric("request_success_total", finished_reason="length") - before[1] == len(BODIES)
    assert engine.metric("time_to_first_token_seconds_count") > 0
    assert engine.metric("step_run_seconds_count") > 0
    assert httpx.get(f"{engine.url}/load", timeout=WATCHDOG_S).status_code == 200
    assert httpx.get(f"{engine.url}/version", timeout=WATCHDOG_S).json()["version"]
    assert httpx.get(f"{engine.url}/health/live", timeout=WATCHDOG_S).status_code == 200


def test_nothing_is_logged_per_request(engine: EngineProcess) -> None:
    """A thousand steps add no line. Retried where a late line of the start came meanwhile."""

    def num_lines_of_many() -> int:
        answers(engine, BODIES)
        before = len(engine.output)
        answers(engine, BODIES * 4)
        return len(engine.output) - before

    assert any(num_lines_of_many() == 0 for _ in range(5))


def test_without_a_terminal_logs_are_on_stderr(engine: EngineProcess) -> None:
    wait_until(lambda: any(line.startswith("[worker0] ") and "device" in line for line in engine.output), what="worker0's log")


def test_health_names_the_actor(engine: EngineProcess) -> None:
    """Asked over a connection that is already open, since the state lasts only until the worker's successor is ready. The
    client may stall for as long, so the successor dies too."""
    with httpx.Client(base_url=engine.url, timeout=WATCHDOG_S) as client:
        assert client.get("/health").status_code == 200

        def is_named_meanwhile() -> bool:
            epoch = engine.kill("worker0")
            is_named = False
            while not is_named and int(engine.actors()["worker0"]["epoch"]) == epoch:
                answer = client.get("/health")
                is_named = answer.status_code == 503 and "worker0" in answer.text
            engine.wait_for_restart("worker0", epoch)
            return is_named

        wait_until(is_named_meanwhile, what="/health names worker0")


def test_kv_events(engine: EngineProcess) -> None:
    """Stored events chain: each parent is a block that was stored before, and the tokens are the prompt's."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.connect(engine.run.kv_events_endpoint())
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        events: list[dict[str, object]] = []

        def prompt_is_stored() -> bool:
            body = {"prompt": list(range(100, 164)), "max_tokens": 2, "temperature": 0}
            httpx.post(
                f"{engine.url}/admin/reset_prefix_cache", json={}, timeout=WATCHDOG_S, headers=OPERATOR
            ).raise_for_status()
            httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).raise_for_status()
            while socket.poll(200):
                events.extend(msgspec.msgpack.decode(socket.recv_multipart()[-1])[1])
            kinds = {event["type"] for event in events}
            return "AllBlocksCleared" in kinds and any(is_of_prompt(event) for event in events)

        def is_of_prompt(event: dict[str, object]) -> bool:
            return event["type"] == "BlockStored" and event["token_ids"][:16] == list(range(100, 116))  # type: ignore[index]

        wait_until(prompt_is_stored, what="stored and cleared events")
    finally:
        socket.close(0)
        context.term()


def test_a_dead_engine_is_read() -> None:
    engine = EngineProcess(MODEL).start()
    try:
        answers(engine, BODIES)
        pids = [int(row["pid"]) for row in engine.actors().values()]
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait_for_exit()
        wait_until(lambda: all(map(is_gone, pids)), what="children gone")
        run_id = engine.run.run_id
        assert "dead" in tokamak("ctl", "--run", run_id, "ps").lower()
        assert "dead" in tokamak("top", "--run", run_id, "--once").lower()
        assert "worker_steps_total" in tokamak("ctl", "--run", run_id, "counters")
    finally:
        engine.close()
    with EngineProcess(MODEL):
        pass
    assert leftovers(pids) == []
