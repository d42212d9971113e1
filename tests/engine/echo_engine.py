"""An engine of small actors as a process of its own: `python -m tests.engine.echo_engine PLAN [FIELD=VALUE ...]`.

PLAN is `name=Class,...` of `tests/engine/echo.py`; fields are those of EngineConfig. `EchoEngine` starts and watches one for a
test.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from engine.checkpoint.record import ModelRecord
from engine.process.control_client import ControlClient
from engine.process.run_directory import Run, new_run_id, open_run, root_lock, runs_root
from engine.process.topology import ActorPlan
from engine.supervisor.launch import serve
from engine.supervisor.progress import PlainProgress
from engine.supervisor.reaper import reap
from shm.counters import ActorSnapshot, Counters, State
from shm.segment import segment_names
from tests.configurations import engine_config
from tests.paths import GOLDEN, REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

ECHO_PLAN = "ping0=PingActor,echo0=EchoActor,echo1=EchoActor"


def main(arguments: list[str]) -> int:
    plan = [
        ActorPlan(name, f"tests.engine.echo:{target}") for name, target in (part.split("=") for part in arguments[0].split(","))
    ]
    run_id = new_run_id()
    fields = {
        "model": "/none",
        "max_model_len": 64,
        "num_kv_blocks": 4,
        "kv_cache_bytes": 4096,
        "port": 0,
        "run_id": run_id,
        "run_dir": str(runs_root() / run_id),
    }
    fields |= dict(argument.split("=", 1) for argument in arguments[1:])
    config = engine_config(**fields)
    return serve(config, ModelRecord.read(GOLDEN / "llama"), plan, PlainProgress(), time.monotonic())


class EchoEngine:
    """One engine under test, with `root` as its XDG_RUNTIME_DIR."""

    def __init__(self, root: Path, plan: str = ECHO_PLAN, **fields: str | int | float) -> None:
        self.root = root / "tokamak"
        self.output: list[str] = []
        self._known_runs = set(self.run_directories())
        settings = [f"{name}={value}" for name, value in fields.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.echo_engine", plan, *settings],
            cwd=REPOSITORY,
            env={**os.environ, "XDG_RUNTIME_DIR": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._may_read = threading.Event()
        self._may_read.set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while self._may_read.wait() and (line := self.process.stdout.readline()):
            self.output.append(line.rstrip("\n"))

    def fill_output(self) -> None:
        """Stop reading what the engine prints, and fill the pipe, until `read_output`."""
        self._may_read.clear()
        pipe = os.open(f"/proc/{self.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        try:
            for size in (select.PIPE_BUF, 1):
                with contextlib.suppress(BlockingIOError):
                    while os.write(pipe, b"\n" * size):
                        pass
        finally:
            os.close(pipe)

    def read_output(self) -> None:
        self._may_read.set()

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    def run_directories(self) -> list[Path]:
        """Return the present run directories."""
        with contextlib.suppress(FileNotFoundError):
            return [entry for entry in self.root.iterdir() if not entry.name.startswith(".")]
        return []

    def new_run_directories(self) -> list[Path]:
        """Return run directories that did not exist when this engine was started."""
        return [path for path in self.run_directories() if path not in self._known_runs]

    def run(self) -> Run:
        """Return this engine's run, found by the owner of its lock."""

        def own() -> Run | None:
            assert self.process.poll() is None, self.text
            for directory in self.run_directories():
                owner = Run(directory.name, directory).owner()
                if owner is not None and owner.pid == self.process.pid and (directory / "manifest.json").exists():
                    return open_run(directory)
            return None

        return wait_until(own, what="run directory")

    def wait_ready(self) -> EchoEngine:
        wait_until(
            lambda: self.process.poll() is not None or any(line.startswith("ready ") for line in self.output), what="ready"
        )
        assert self.process.poll() is None, self.text
        return self

    def wait_exit(self, timeout_s: float = WATCHDOG_S) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait_exit()

    def control(self) -> ControlClient:
        return ControlClient(self.run())

    def counters(self) -> Counters:
        return Counters.attach_readonly(self.run().run_id)

    def actor(self, name: str) -> ActorSnapshot:
        counters = self.counters()
        try:
            return counters.actor(name).snapshot()
        finally:
            counters.close()

    def value(self, name: str, actor: str) -> float:
        counters = self.counters()
        try:
            return counters.counter(name, actor).value
        finally:
            counters.close()

    def pids(self) -> list[int]:
        """Return the pids of all its processes, including the supervisor."""
        counters = self.counters()
        try:
            return [actor.pid for actor in counters.actors()]
        finally:
            counters.close()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> ActorSnapshot:
        """Send a signal to one actor; return its row from before."""
        before = self.actor(name)
        os.kill(before.pid, number)
        return before

    def wait_for_epoch(self, name: str, epoch: int) -> ActorSnapshot:
        """Wait until the actor runs with at least this epoch."""

        def is_back() -> ActorSnapshot | None:
            assert self.process.poll() is None, self.text
            row = self.actor(name)
            return row if row.epoch >= epoch and row.state in (State.READY, State.RUNNING) else None

        return wait_until(is_back, what=f"{name} with epoch {epoch}")

    def wait_for_traffic(self) -> None:
        """Wait until messages come back to the ping actor (again)."""
        before = self.value("messages_received_total", "ping0")
        wait_until(lambda: self.value("messages_received_total", "ping0") >= before + 10, what="messages flow")

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._may_read.set()
        if self.process.poll() is None:
            self.process.kill()
        self.wait_exit()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.root.exists():
            with root_lock(self.root):
                reap(self.root)


def is_gone(pid: int) -> bool:
    """Return whether the process has ended (zombies count as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def is_clean(run: Run) -> bool:
    """Return whether nothing of a run is left."""
    return not run.directory.exists() and not segment_names(run.run_id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
