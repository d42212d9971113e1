"""An engine under test: `tokamak serve` as a child process of the test, its URL, its actors and its counters."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import httpx

from engine.errors import SharedMemoryError
from engine.process.run_directory import Run, run_entries, runs_root
from shm.segment import Segment, segment_names, segment_prefix
from tests.engine.echo_engine import is_gone
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

GOLDEN = REPOSITORY / "tests" / "golden"
DEMO = REPOSITORY / "tools" / "demo" / "model"
ADMIN_KEY = "operator"
OPERATOR = {"authorization": f"Bearer {ADMIN_KEY}"}
READY = re.compile(r"ready (http://[0-9.]+:(\d+))")

START_LIMIT_S = 120.0  # of an engine on a busy machine


class EngineProcess:
    """Starts an engine in `__enter__` and stops it with SIGTERM in `__exit__`, where exit code 0 is checked; it ends with the
    process that tests, if that is killed. It takes a port that is free; `url` and `port` are those of its ready line."""

    def __init__(self, model: Path | str, *options: str, environment: dict[str, str] | None = None) -> None:
        self.port = 0
        self.url = ""
        self.command = [sys.executable, "-m", "tools.cli", "serve", "--model", str(model), "--port", "0"]
        self.command += ["--admin-key", ADMIN_KEY, "--end-with", str(os.getpid()), *options]
        self.environment = {**os.environ, **(environment or {})}
        self.directory = REPOSITORY  # where it is started
        self.process: subprocess.Popen[str] | None = None
        self.output: list[str] = []
        self._reader: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------- life

    def start(self) -> EngineProcess:
        """Start and wait for the line `ready http://...`; AssertionError with the output if the engine ends before."""
        self.launch()
        wait_until(lambda: self.is_ready or self.has_ended, START_LIMIT_S, what="engine ready")
        assert self.is_ready, f"the engine ended with {self.process and self.process.returncode}:\n{self.text}"
        return self

    def launch(self) -> None:
        """Start without waiting."""
        self.process = subprocess.Popen(
            self.command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if ready := READY.fullmatch(line.rstrip("\n")):
                    self.port, self.url = int(ready[2]), ready[1]
                self.output.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    @property
    def is_ready(self) -> bool:
        return bool(self.url)

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def run(self) -> Run:
        """Run directory, while the engine runs or after it was killed."""
        for entry in run_entries(runs_root()):
            owner = Run(entry.name, entry).owner()
            if owner is not None and owner.pid == self.pid:
                return Run(entry.name, entry)
        raise AssertionError(f"no run directory belongs to {self.pid}")

    def wait_for_exit(self, timeout_s: float = WATCHDOG_S) -> int:
        """Return the launcher's exit code, after reading all of its output."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        assert self._reader is not None
        self._reader.join(timeout_s)
        return code

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask the engine to end and return the exit code."""
        os.kill(self.pid, signal_number)
        return self.wait_for_exit()

    def __enter__(self) -> EngineProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.has_ended:
            return
        code = self.stop()
        assert code == 0 or error is not None, f"exit code {code}:\n{self.text}"

    def close(self) -> None:
        """End the engine in whatever state it is."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.wait_for_exit()

    # ---------------------------------------------------------------------------------------------- a look inside

    def actors(self) -> dict[str, dict[str, int | str | float]]:
        """Return the actor table of /admin/actors by name; empty while no api process answers."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self.url}/admin/actors", timeout=WATCHDOG_S, headers=OPERATOR)
            if answer.status_code == 200:
                return {row["name"]: row for row in answer.json()["actors"]}
        return {}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the rows of `tokamak:<name>` with these labels on /metrics."""
        total, found = 0.0, False
        for line in httpx.get(f"{self.url}/metrics", timeout=WATCHDOG_S).text.splitlines():
            key, _, value = line.rpartition(" ")
            bare, _, text = key.partition("{")
            if bare == f"tokamak:{name}" and all(f'{label}="{wanted}"' in text for label, wanted in labels.items()):
                total, found = total + float(value), True
        assert found, f"no row tokamak:{name} {labels}"
        return total

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=WATCHDOG_S).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, actor: str, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal to one actor, by the pid in the actor table; returns its epoch."""
        row = wait_until(self.actors, what="the actor table")[actor]
        os.kill(int(row["pid"]), signal_number)
        return int(row["epoch"])

    def wait_for_restart(self, actor: str, old_epoch: int) -> None:
        """Wait until the actor has a newer epoch and the whole engine is healthy."""

        def is_back() -> bool:
            row = self.actors().get(actor)
            return row is not None and int(row["epoch"]) > old_epoch and self.is_healthy()

        wait_until(is_back, what=f"{actor} restarted")

    def wait_until_idle(self) -> None:
        """Wait until no sequence runs or waits and all KV blocks are free."""

        def is_idle() -> bool:
            return (
                self.metric("num_requests_running") == 0
                and self.metric("num_requests_waiting") == 0
                and self.metric("num_free_kv_blocks") == self.metric("num_kv_blocks")
            )

        wait_until(is_idle, what="engine idle")


def leftovers(run_pids: list[int]) -> list[str]:
    """Return leftovers of an ended engine: its processes, and shared memory and run directories without a living owner."""
    processes = [f"process {pid}" for pid in run_pids if not is_gone(pid)]
    segments = [name for name in segment_names() if not _has_living_owner(name)]
    semaphores = [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.{segment_prefix()[1:]}")]
    directories = [str(entry) for entry in run_entries(runs_root()) if not Run(entry.name, entry).is_alive()]
    return processes + segments + semaphores + directories


def _has_living_owner(segment: str) -> bool:
    try:
        return Segment.attach(segment, is_readonly=True).owner.is_alive()
    except FileNotFoundError:
        return True  # removed meanwhile by whom it belongs to
    except SharedMemoryError:
        return segment not in segment_names()
