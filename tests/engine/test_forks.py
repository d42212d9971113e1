"""Forked children: what they keep of the supervisor, how they end, and that later lives are started by exec."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from engine.forks import may_fork
from tests.engine.echo_engine import REPOSITORY, EchoEngine

FORK = """
import os, sys
from pathlib import Path
import engine.child
from engine.forks import fork_actor
def main(arguments):
    {body}
engine.child.main = main
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
print("left in the buffer", end="")
sys.exit(fork_actor("echo0", ["a", "b"], Path("/"), log, {{"A_NAME": "value"}}, -1).wait() & 0xFF)
"""


def run_forked(directory: Path, body: str) -> tuple[int, str, str]:
    """Exit code of a fork whose `main` is `body`, what is in its log, and what the parent printed."""
    program = FORK.format(body=body)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    return parent.returncode, (directory / "log").read_text(), parent.stdout


def test_a_fork_runs_main_in_its_directory_and_environment(tmp_path: Path) -> None:
    body = "print(arguments, os.getcwd(), os.environ['A_NAME'], open('/proc/self/comm').read().strip()); return 7"
    assert run_forked(tmp_path, body) == (7, "['a', 'b'] / value echo0\n", "left in the buffer")


def test_a_fork_ends_as_a_process_of_its_own_does(tmp_path: Path) -> None:
    assert run_forked(tmp_path, "sys.exit(3)")[:2] == (3, "")
    assert run_forked(tmp_path, "os.kill(os.getpid(), 9)")[0] == -9 & 0xFF
    code, log, _ = run_forked(tmp_path, "raise ValueError('wrong')")
    assert code == 1
    assert log.endswith("ValueError: wrong\n")


def test_first_lives_are_forked_and_later_ones_are_not(tmp_path: Path) -> None:
    with EchoEngine(tmp_path) as engine:
        engine.wait_ready()
        assert {name: is_forked(engine.actor(name).pid) for name in ("ping0", "echo0")} == {"ping0": True, "echo0": True}
        engine.kill("echo0")
        assert not is_forked(engine.wait_for_epoch("echo0", 2).pid)
        assert engine.stop() == 0


def is_forked(pid: int) -> bool:
    return b"engine.child" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_forked_actor_has_no_descriptor_of_the_supervisor(tmp_path: Path) -> None:
    """Neither its locks, nor its port, nor the pidfds of the actors that were started before."""
    with EchoEngine(tmp_path) as engine:
        engine.wait_ready()
        run_directory = str(engine.run().directory)
        for name in ("ping0", "echo0", "echo1"):
            pid = engine.actor(name).pid
            links = {entry.name: os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            assert links["0"] == "/dev/null"
            assert links["1"] == links["2"] == f"{run_directory}/{name}.log"
            assert not [link for link in links.values() if "pidfd" in link or link.endswith("/lock")]
            inherited = [number for number, link in links.items() if link == "/dev/null" or link.startswith(run_directory)]
            assert sorted(inherited) == ["0", "1", "2"]
        assert engine.stop(signal.SIGINT) == 0


def test_a_process_of_several_threads_does_not_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert not may_fork()
    done.set()
    thread.join()
