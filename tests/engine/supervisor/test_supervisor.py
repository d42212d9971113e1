"""Supervision with real processes: kills, hangs, restarts and their limit, failed starts, and all ways to end."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest

from engine.process.run_directory import Run
from shm.counters import State
from shm.segment import segment_names
from tests.engine.echo_engine import EchoEngine, is_clean, is_gone
from tests.waiting import WATCHDOG_S, wait_until

HANG_TIMEOUT_S = 4  # of an actor that is stopped; one that only waits for a core must not be taken for it


def test_each_actor_killed_in_turn(tmp_path: Path) -> None:
    """No other actor gets a new process, peers learn the new epoch, and messages flow again."""
    with EchoEngine(tmp_path, restart_limit=10) as engine:
        engine.wait_ready()
        engine.wait_for_traffic()
        for round_number in (1, 2):
            for name in ("ping0", "echo0", "echo1"):
                others = {other: engine.actor(other).pid for other in ("ping0", "echo0", "echo1") if other != name}
                engine.kill(name)
                row = engine.wait_for_epoch(name, round_number + 1)
                engine.wait_for_traffic()
                assert row.restarts == round_number
                assert {other: engine.actor(other).pid for other in others} == others
        assert engine.value("actor_restarts_total", "supervisor") == 6
        counters = engine.counters()
        wanted = {"saw echo1 with epoch 3", "echo0 died: killed by SIGKILL"}
        wait_until(lambda: wanted <= {entry.text for entry in counters.errors.entries()}, what="all that was told")
        counters.close()
        run = engine.run()
        assert engine.stop() == 0
        assert is_clean(run)


def test_unread_output_does_not_stop_restarts(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, restart_limit=10) as engine:
        engine.wait_ready()
        engine.fill_output()
        for epoch in range(2, 8):
            engine.kill("echo0")
            engine.wait_for_epoch("echo0", epoch)
        engine.wait_for_traffic()
        engine.read_output()
        wait_until(lambda: "restarted with epoch 7" in engine.text, what="the last line")
        assert engine.stop() == 0


def test_unread_output_does_not_stop_the_end(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as engine:
        run = engine.wait_ready().run()
        engine.fill_output()
        engine.process.terminate()
        assert engine.process.wait(WATCHDOG_S) == 0
        assert is_clean(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    with EchoEngine(tmp_path) as engine:
        engine.wait_ready()
        run, pids = engine.run(), engine.pids()
        assert engine.stop(number) == 0
        assert all(map(is_gone, pids))
        assert is_clean(run)
        # Only the earlier states that were seen are reported.
        reached = [line.split()[2] for line in engine.output if line.endswith(" ready")]
        assert sorted(reached) == ["echo0", "echo1", "ping0"]
        assert any(line == f"ready http://127.0.0.1:{run_port(engine)}" for line in engine.output)


def run_port(engine: EchoEngine) -> str:
    return next(line for line in engine.output if line.startswith("ready ")).rpartition(":")[2]


def test_next_start_cleans_up_after_a_killed_supervisor(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as first:
        first.wait_ready()
        run, pids = first.run(), first.pids()
        os.kill(pids[1], signal.SIGSTOP)  # also one that does not run
        first.process.kill()
        first.wait_exit()
        wait_until(lambda: all(map(is_gone, pids)), what="children die with the supervisor")
        assert not run.is_alive()
        assert not is_clean(run)
        with EchoEngine(tmp_path) as second:
            second.wait_ready()
            assert is_clean(run)
            assert second.stop() == 0


def test_killed_at_any_moment_of_the_start(tmp_path: Path) -> None:
    """The next start removes everything that the dead supervisor had made. A moment is the first one with a given number of the
    run's files and segments."""
    runs: list[Run] = []
    for number in range(16):
        with EchoEngine(tmp_path) as engine:
            wait_until(partial(has_made, engine, number), what=f"{number} things of the run")
            runs += [Run(path.name, path) for path in engine.run_directories()]
            engine.process.kill()
    with EchoEngine(tmp_path) as last:
        assert last.wait_ready().run_directories() == [last.run().directory]
        assert last.stop() == 0
    assert len(runs) >= 16
    assert all(map(is_clean, runs))


def has_made(engine: EchoEngine, number: int) -> bool:
    """Return whether the engine's own run has more than `number` files, segments and ready lines, or all."""
    made = [*(engine.new_run_directories())]
    made += [path for directory in made for path in [*directory.iterdir(), *segment_names(directory.name)]]
    return len(made) > number or any(line.startswith("ready ") for line in engine.output)


def test_a_hung_actor_is_killed_and_started_again(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, hang_timeout_s=HANG_TIMEOUT_S) as engine:
        engine.wait_ready()
        engine.kill("echo0", signal.SIGSTOP)
        engine.wait_for_epoch("echo0", 2)
        engine.wait_for_traffic()
        assert engine.value("actor_hangs_total", "supervisor") == 1
        assert f"echo0 hangs: no heartbeat for {HANG_TIMEOUT_S} s" in engine.text
        assert engine.stop() == 0


def test_a_hang_leaves_its_stacks_in_the_log(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "stuck0=StuckActor", hang_timeout_s=HANG_TIMEOUT_S, restart_limit=2) as engine:
        engine.wait_ready()
        engine.wait_for_epoch("stuck0", 2)
        log = engine.run().log_path("stuck0").read_text()
        assert "in do_work" in log
        assert "echo.py" in log


def test_too_many_deaths_end_the_engine(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "echo0=EchoActor,crash0=CrashingActor") as engine:
        assert engine.wait_exit() == 1
        assert "3 deaths within 300 s" in engine.text
        assert "RuntimeError: it broke" in engine.text
        assert engine.run_directories() == []


def test_file_that_kills_its_decoder_ends_no_engine(tmp_path: Path) -> None:
    """Four deaths, and none counts toward the limit of two."""
    with EchoEngine(tmp_path, "echo0=EchoActor,media0=VictimActor", restart_limit=2) as engine:
        engine.wait_ready()
        assert engine.wait_for_epoch("media0", 5).restarts == 4
        engine.kill("media0")
        engine.wait_for_epoch("media0", 6)
        engine.kill("media0")
        assert engine.wait_exit() == 1


def test_failed_child_ends_the_start_with_its_cause(tmp_path: Path) -> None:
    """A checkpoint that cannot be served is the user's mistake, as a wrong option is."""
    with EchoEngine(tmp_path, "echo0=EchoActor,failing0=FailingActor,stubborn0=StubbornActor") as engine:
        assert engine.wait_exit() == 2
        assert "the engine cannot start: failing0 died: the weights are made of cheese; use others" in engine.text
        assert not any(line.startswith("ready") for line in engine.output)
        assert engine.run_directories() == []


def test_kill_at_start_names_memory(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "killed0=KilledActor") as engine:
        assert engine.wait_exit() == 1
        assert "the engine cannot start: killed0 died: killed by SIGKILL (probably out of memory)" in engine.text


def test_unknown_actor_class_ends_the_start(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "echo0=NoSuchActor") as engine:
        assert engine.wait_exit() == 1
        assert "NoSuchActor" in engine.text


def test_an_actor_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "stubborn0=StubbornActor", stop_timeout_s=0.3) as engine:
        engine.wait_ready()
        run, pids = engine.run(), engine.pids()
        assert engine.stop() == 0
        assert all(map(is_gone, pids))
        assert is_clean(run)


def test_asked_twice_it_ends_at_once(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "stubborn0=StubbornActor", stop_timeout_s=3600) as engine:
        engine.wait_ready()
        run = engine.run()
        engine.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping: SIGINT" in engine.text, what="stopping")
        assert engine.stop(signal.SIGINT) == 0
        assert is_clean(run)


def test_stopped_while_starting(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, "slow0=SlowActor,echo0=EchoActor") as engine:
        run = engine.run()
        wait_until(lambda: segment_names(run.run_id), what="counters")
        wait_until(lambda: engine.actor("slow0").state == State.LOADING, what="slow0 loads")
        assert engine.stop() == 0
        assert is_clean(run)


def test_two_engines_side_by_side(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as first, EchoEngine(tmp_path) as second:
        first.wait_ready()
        second.wait_ready()
        assert first.run().run_id != second.run().run_id
        assert first.stop() == 0
        second.wait_for_traffic()
        assert second.stop() == 0


def test_busy_port_is_reported_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with EchoEngine(tmp_path, port=port) as engine:
            assert engine.wait_exit() == 1
            assert f"port {port} on 127.0.0.1 is in use" in engine.text
            assert engine.run_directories() == []


def test_port_of_another_engine_is_busy(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as first:
        port = first.wait_ready().run().manifest().config.port
        with EchoEngine(tmp_path, port=port) as second:
            assert second.wait_exit() == 1
            assert f"port {port} on 127.0.0.1 is in use" in second.text
        assert first.stop() == 0


def test_given_run_directory_keeps_foreign_files(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir(mode=0o700)
    (directory / "notes.txt").write_text("keep me")
    with EchoEngine(tmp_path, run_dir=str(directory)) as engine:
        engine.wait_ready()
        assert engine.run().directory == directory
        with EchoEngine(tmp_path, run_dir=str(directory)) as second:
            assert second.wait_exit() == 1
            assert "in use by another engine" in second.text
        assert engine.stop() == 0
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_too_little_shared_memory_is_reported_at_once(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, max_model_len=1 << 40) as engine:
        assert engine.wait_exit() == 1
        assert "of shared memory, /dev/shm has" in engine.text
        assert engine.run_directories() == []


def test_too_large_arena_is_reported_at_once(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, kv_cache_bytes=1 << 50) as engine:
        assert engine.wait_exit() == 1
        assert "--kv-cache-memory" in engine.text
        assert engine.run_directories() == []


def test_too_long_a_run_directory(tmp_path: Path) -> None:
    with EchoEngine(tmp_path, run_dir=str(tmp_path / ("x" * 120))) as engine:
        assert engine.wait_exit() == 2
        assert "--run-dir" in engine.text
