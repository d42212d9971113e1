"""`tokamak top` on real shared memory: of a living engine (this process acts as it) and of one that was killed."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.metrics import metrics_of
from engine.process.run_directory import Manifest, Run, make_private_directory, new_run_id
from engine.process.topology import default_plan
from shm.counters import Counters, State
from shm.mailbox import Mailbox, MailboxSender
from shm.process import ProcessIdentity
from tests.configurations import engine_config
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until
from tools.top.command import main

ACTORS = ("supervisor", "api0", "tokenizer0", "scheduler", "cache", "worker0")
RUN_ID = new_run_id()
TOP = [sys.executable, "-c", "import sys; from tools.top.command import main; sys.exit(main(sys.argv[1:]))"]

KILLED_ENGINE = """
import os, signal, sys
from tests.tools.top.test_top import engine
with engine(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Engine:
    """Shared memory of a run, as its actors fill it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.counters = Counters.create(run.run_id, ACTORS, metrics_of)
        self.mailbox = Mailbox.create(run.run_id, "scheduler", ("supervisor", "tokenizer0"), 1 << 16)
        for name in ACTORS:
            row = self.counters.actor(name)
            row.begin_epoch(1, time.monotonic_ns())
            row.set_process(ProcessIdentity.of())
            row.set_state(State.RUNNING)

    def work(self) -> None:
        scheduler = "scheduler"
        self.counters.counter("num_requests_running", scheduler).set(5)
        self.counters.counter("num_kv_blocks", scheduler).set(100)
        self.counters.counter("num_free_kv_blocks", scheduler).set(75)
        self.counters.counter("generation_tokens_total", "api0").add(640)
        self.counters.histogram("step_run_seconds", scheduler).observe_many(0.004, 20)
        self.counters.histogram("time_to_first_token_seconds", "api0").observe(0.03)
        self.counters.errors.record("worker0", "the sky is falling")
        assert MailboxSender.attach(self.run.run_id, scheduler, "tokenizer0", 1).try_send(b"x" * 100)

    def close(self) -> None:
        self.counters.unlink()
        self.mailbox.unlink()
        self.mailbox.close()
        self.counters.close()


@contextmanager
def engine(run_id: str = RUN_ID) -> Iterator[Engine]:
    """A run below $XDG_RUNTIME_DIR with its counters and one mailbox."""
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "tokamak" / run_id
    make_private_directory(directory.parent)
    make_private_directory(directory)
    run = Run(run_id, directory)
    config = engine_config(
        model="/models/tiny",
        served_model_name=("tiny",),
        max_model_len=128,
        num_kv_blocks=100,
        cpu_kernels={"base": "avx2", "int8": "avxvnni"},
        run_id=run_id,
        run_dir=str(directory),
    )
    run.write_manifest(Manifest(config=config, actors=default_plan(config), pid=os.getpid(), started_at=time.time()))
    made = Engine(run)
    try:
        made.work()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--json", "--interval", "0.05", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_has_counters_and_derived_values(capsys: pytest.CaptureFixture[str], runtime_directory: Path) -> None:
    with engine() as running:
        document = as_json(capsys)
    assert document["run"]["run_id"] == RUN_ID
    assert document["run"]["run_dir"] == str(running.run.directory)
    assert document["run"]["cpu_kernels"] == {"base": "avx2", "int8": "avxvnni"}
    assert document["is_alive"] is True
    derived = document["derived"]
    assert (derived["num_running"], derived["num_used_kv_blocks"]) == (5, 25)
    assert derived["generation_tokens_per_s"] == 0
    assert derived["step"]["run"]["time"]["count"] == 20
    assert derived["latency"]["ttft"]["count"] == 1
    assert [actor["name"] for actor in document["actors"]] == list(ACTORS)
    worker = document["actors"][-1]
    assert (worker["state"], worker["pid"], worker["is_alive"], worker["epoch"]) == ("RUNNING", os.getpid(), True, 1)
    assert worker["resident_bytes"] > 1 << 20
    assert 0 <= worker["heartbeat_age_s"] < 60
    ring = next(ring for ring in document["rings"] if ring["sender"] == "tokenizer0")
    assert (ring["receiver"], ring["num_records"]) == ("scheduler", 1)
    assert ring["fill_bytes"] >= 100
    assert document["errors"][0]["text"] == "the sky is falling"
    row = next(row for row in document["rows"] if row["name"] == "num_requests_running")
    assert (row["value"], row["labels"], row["unit"]) == (5, {"actor": "scheduler"}, "samples")


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    with engine():
        assert main(["--once", "--interval", "0.05"]) == 0
        screen = capsys.readouterr().out
    for wanted in (
        RUN_ID,
        *ACTORS,
        "5 running",
        "25/100",
        "tokenizer0 > scheduler",
        "the sky is falling",
        "tiny",
        "avx2; avxvnni: int8",
    ):
        assert wanted in screen
    assert "dead" not in screen.lower()


def test_a_killed_engine_is_read_and_is_dead(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_ENGINE, RUN_ID], cwd=REPOSITORY, timeout=WATCHDOG_S, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        assert main(["--once"]) == 0
        screen = capsys.readouterr().out
        document = as_json(capsys)
    finally:
        Counters.attach(RUN_ID).unlink()
        Mailbox.attach(RUN_ID, "scheduler", 1).unlink()
    assert "DEAD" in screen
    assert "gone (RUNNING)" in screen
    assert "5 running" in screen
    assert "the sky is falling" in screen
    assert document["is_alive"] is False
    assert document["derived"]["num_running"] == 5
    assert {actor["is_alive"] for actor in document["actors"]} == {False}
    assert {actor["cpu_seconds"] for actor in document["actors"]} == {None}


def test_run_is_found_by_id_or_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with engine() as running:
        assert as_json(capsys, "--run", RUN_ID[:6])["run"]["run_id"] == RUN_ID
        assert as_json(capsys, "--run-dir", str(running.run.directory))["run"]["run_id"] == RUN_ID
        assert main(["--once", "--run", "nothing"]) == 1
        assert "no run nothing" in capsys.readouterr().err


def test_no_engine_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--once"]) == 1
    assert "start one with" in capsys.readouterr().err
    assert main(["--once", "--run-dir", str(tmp_path)]) == 1
    assert "manifest" in capsys.readouterr().err


def test_a_run_without_counters(capsys: pytest.CaptureFixture[str]) -> None:
    with engine() as running:
        pass
    assert running.run.manifest_path.exists()
    assert main(["--once"]) == 1
    assert "tokamak top:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["q", "x then q", "SIGTERM", "SIGINT"])
def test_live_until_q(leave: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with engine():
        process = subprocess.Popen(
            [*TOP, "--interval", "0.05"], cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        shown = b""

        def has_shown(text: bytes) -> bool:
            nonlocal shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
            return text in shown

        try:
            wait_until(lambda: has_shown(b"q: quit"), what="the screen")
            assert b"5 running" in shown.replace(b"\x1b[0m", b"").replace(b"\x1b[1m", b"").replace(b"\x1b[2m", b"")
            if leave.startswith("SIG"):
                process.send_signal(getattr(signal, leave))
            else:
                os.write(ours, leave[0].encode())
                os.write(ours, leave[-1].encode())
            wait_until(lambda: has_shown(b"\x1b[?1049l"), what="the old screen comes back")
            assert process.wait(WATCHDOG_S) == (143 if leave == "SIGTERM" else 0)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
