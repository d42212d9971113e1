"""Outside harm that does not end a living engine: removed files, and exhausted resources."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.messages import ListActors
from engine.process.run_directory import Run, choose_run
from shm.counters import Counters, State
from shm.segment import DIRECTORY, segment_names
from tests.engine.echo_engine import EchoEngine, is_clean
from tests.waiting import wait_until

NAMES = ("ping0", "echo0", "echo1")
MAX_DESCRIPTORS = 10  # fewer than the supervisor has: it gets no other


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoEngine]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with EchoEngine(tmp_path, restart_limit=10) as running:
        yield running.wait_ready()


def texts(counters: Counters) -> str:
    return "\n".join(f"{entry.actor}: {entry.text}" for entry in counters.errors.entries())


def test_files_removed_under_a_living_engine(engine: EchoEngine) -> None:
    """A logout with RemoveIPC and a cleaner of /tmp do that. All actors come back and are found as before."""
    run = engine.run()
    names, files = segment_names(run.run_id), sorted(path.name for path in run.directory.iterdir() if path.suffix != ".log")
    counters = Counters.attach(run.run_id)
    engine.kill("echo0")  # it may be started before the supervisor looks
    for name in names:
        (DIRECTORY / name[1:]).unlink()
    shutil.rmtree(engine.root)
    wait_until(lambda: segment_names(run.run_id) == names, what="the names are there again")
    wait_until(lambda: all((run.directory / name).exists() for name in files), what="the files are there again")
    for name in NAMES:
        epoch = counters.actor(name).epoch
        os.kill(counters.actor(name).pid, 9)
        engine.wait_for_epoch(name, epoch + 1)
    engine.wait_for_traffic()
    assert choose_run() == run
    assert run.is_alive()
    assert {row["name"] for row in engine.control().ask(ListActors(), 60).details["actors"]} == {"supervisor", *NAMES}
    assert "restored files" in texts(counters)
    assert counters.counter("run_files_made_again_total", "supervisor").value >= len(names)
    counters.close()
    assert engine.stop() == 0
    assert is_clean(run)


def test_files_that_cannot_be_restored(engine: EchoEngine) -> None:
    """The loss is reported while everything still works; an actor that dies meanwhile is restarted until it comes back."""
    run = engine.run()
    counters = Counters.attach(run.run_id)
    is_incomplete = counters.counter("is_run_incomplete", "supervisor")
    shutil.rmtree(run.directory)
    run.directory.write_text("in the way")
    wait_until(lambda: is_incomplete.value, what="it is noticed")
    assert "supervisor: files of the run in" in texts(counters)
    os.kill(counters.actor("echo0").pid, 9)
    wait_until(lambda: "echo0: echo0 cannot be started" in texts(counters), what="echo0 cannot be started")
    wait_until(lambda: counters.actor("echo0").state == State.DEAD, what="echo0 waits")
    assert engine.process.poll() is None
    run.directory.unlink()
    wait_until(lambda: not is_incomplete.value, what="the run is complete again")
    engine.wait_for_epoch("echo0", 2)
    engine.wait_for_traffic()
    counters.close()
    assert engine.stop() == 0


def test_no_process_to_be_had(engine: EchoEngine) -> None:
    counters = Counters.attach(engine.run().run_id)
    limits = resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, limits[1]))
    os.kill(counters.actor("echo1").pid, 9)
    wait_until(lambda: "echo1: echo1 cannot be started" in texts(counters), what="echo1 cannot be started")
    engine.wait_for_traffic()  # the others serve
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, limits)
    engine.wait_for_epoch("echo1", 2)
    counters.close()
    assert engine.stop() == 0


def test_other_engine_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """The directory of one engine was removed, and a second one has it now: the first reports that, and takes nothing from the
    second."""
    directory = tmp_path / "mine"
    with EchoEngine(tmp_path, run_dir=str(directory)) as first:
        first.wait_ready()
        counters = Counters.attach(first.run().run_id)
        os.kill(first.process.pid, 19)  # SIGSTOP: it sees nothing before the second is there
        shutil.rmtree(directory)
        with EchoEngine(tmp_path, run_dir=str(directory)) as second:
            second.wait_ready()
            os.kill(first.process.pid, 18)
            wait_until(lambda: counters.counter("is_run_incomplete", "supervisor").value, what="it is noticed")
            assert "is in use by another engine" in texts(counters)
            assert Run("", directory).manifest().pid == second.process.pid
            assert first.stop() == 0
            second.wait_for_traffic()
            assert second.stop() == 0
        counters.close()
