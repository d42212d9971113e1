"""`tokamak ctl` on a living, a hung and a dead engine of small actors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.engine.echo_engine import REPOSITORY, EchoEngine, is_clean, is_gone
from tests.waiting import WATCHDOG_S, wait_until
from tools.ctl import main

PLAN = "scheduler=SchedulerStandIn,echo0=EchoActor,ping0=PingActor"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoEngine]:
    with EchoEngine(tmp_path_factory.mktemp("runtime"), PLAN, hang_timeout_s=3600) as running:
        yield running.wait_ready()


def ctl(root: Path, *arguments: str, code: int = 0) -> str:
    """Return the output of the tool (stderr where it must fail), run in this process to save half a second each time."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as environment, redirect_stdout(output), redirect_stderr(errors):
        environment.setenv("XDG_RUNTIME_DIR", str(root))
        try:
            found = main(list(arguments))
        except SystemExit as end:
            found = end.code  # type: ignore[assignment]
    assert found == code, output.getvalue() + errors.getvalue()
    return errors.getvalue() if code else output.getvalue()


def shell(root: Path, *arguments: str, code: int = 0) -> str:
    """Return the output of the tool as a process."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", "ctl", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": str(root)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


def root_of(engine: EchoEngine) -> Path:
    return engine.root.parent


def test_ps(engine: EchoEngine) -> None:
    text = shell(root_of(engine), "ps")
    assert f"engine {engine.run().run_id} runs" in text
    for name, pid in zip(("supervisor", "scheduler", "echo0", "ping0"), engine.pids(), strict=True):
        assert any(line.split()[:2] == [name, str(pid)] for line in text.splitlines())
    rows = json.loads(ctl(root_of(engine), "ps", "--json"))
    assert [row["name"] for row in rows] == ["supervisor", "scheduler", "echo0", "ping0"]


def test_counters_and_errors(engine: EchoEngine) -> None:
    engine.wait_for_traffic()
    lines = ctl(root_of(engine), "counters", "messages_received").splitlines()
    assert len(lines) == 4
    assert any(line.startswith('messages_received_total{actor="ping0"}') for line in lines)
    rows = json.loads(ctl(root_of(engine), "counters", "--json"))
    assert {"step_run_seconds", "actor_restarts_total"} <= {row["name"] for row in rows}
    assert "step_run_seconds" in ctl(root_of(engine), "counters")
    ctl(root_of(engine), "restart", "echo0")
    wait_until(lambda: "saw echo0 with epoch" in ctl(root_of(engine), "errors"), what="the peer notes the restart")


def test_commands(engine: EchoEngine) -> None:
    root = root_of(engine)
    assert "aborted r7" in ctl(root, "abort", "r7")
    assert "actor 'nobody' does not exist" in ctl(root, "restart", "nobody", code=1)
    assert "does not support the command Resume" in ctl(root, "wake", code=1)
    assert "did not answer Pause within 0.2 s" in ctl(root, "--timeout", "0.2", "sleep", "--mode", "keep", code=1)
    assert "later" in ctl(root, "reload", "--rank", "0")
    assert "/no/such/model" in shell(root, "reload", "/no/such/model", code=1)
    ctl(root, "restart", code=2)
    shell(root, "no-such-command", code=2)


def test_which_engine(engine: EchoEngine, tmp_path: Path) -> None:
    run = engine.run()
    assert run.run_id in ctl(root_of(engine), "--run", run.run_id[:3], "ps")
    assert run.run_id in ctl(tmp_path, "--run-dir", str(run.directory), "ps")
    assert "no engine" in ctl(tmp_path, "ps", code=1)
    assert "no run xyz" in ctl(root_of(engine), "--run", "xyz", "ps", code=1)
    assert "manifest" in ctl(tmp_path, "--run-dir", str(tmp_path), "ps", code=1)


def test_run_is_named_before_or_after_command(engine: EchoEngine) -> None:
    root = root_of(engine)
    shown = ctl(root, "--run", engine.run().run_id, "ps", "--json")
    assert json.loads(ctl(root, "ps", "--json", "--run", engine.run().run_id))[0]["pid"] == json.loads(shown)[0]["pid"]
    assert "no run zz" in ctl(root, "ps", "--run", "zz", code=1)
    assert "no run zz" in ctl(root, "--run", "zz", "stop", "--timeout", "1", code=1)
    assert "not allowed with" in ctl(root, "stop", "--run", engine.run().run_id, "--run-dir", str(root), code=2)


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_command_without_time_to_wait_is_not_sent(engine: EchoEngine, timeout: str) -> None:
    assert f"expected seconds above 0, got {timeout}" in ctl(root_of(engine), "--timeout", timeout, "pause", code=2)


def test_hung_engine_is_readable(engine: EchoEngine) -> None:
    """Every process is stopped, including the supervisor, so no process could answer."""
    pids = engine.pids()
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert "scheduler" in ctl(root_of(engine), "ps")
        assert "messages_sent_total" in ctl(root_of(engine), "counters")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    engine.wait_for_traffic()


def test_a_dead_engine_is_read(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as engine:
        pids = engine.wait_ready().pids()
        engine.process.kill()
        engine.wait_exit()
        wait_until(lambda: all(map(is_gone, pids)), what="children die")
        text = ctl(tmp_path, "ps")
        assert "is dead" in text
        assert sum("DEAD" in line for line in text.splitlines()) == 4
        assert "messages_sent_total" in ctl(tmp_path, "counters")
        ctl(tmp_path, "errors")
        assert "is not running" in ctl(tmp_path, "restart", "echo0", code=1)
        with EchoEngine(tmp_path) as successor:
            successor.wait_ready()
            assert successor.stop() == 0


def test_stop_returns_when_the_engine_has_ended(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as engine:
        run = engine.wait_ready().run()
        ctl(tmp_path, "stop")
        assert is_clean(run)
        assert engine.wait_exit() == 0
