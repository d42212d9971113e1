"""Server process of a benchmark: start, readiness, memory of its process tree, and stop.

Runs in the `tokamak bench compare` process.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from engine.errors import TokamakError

_PSS_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a free TCP port of the loopback address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants: shared pages count once."""
    total = 0
    for process in _tree(pid):
        try:
            total += int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) << 10
        except (OSError, IndexError):
            continue
    return total


def processor_s(pid: int) -> float:
    """Return the CPU time of a process and all its descendants, including reaped ones, in seconds."""
    ticks = 0
    for process in _tree(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
        except (OSError, ValueError, IndexError):
            continue
    return ticks / _TICKS_PER_S


class Others:
    """CPU time of other processes, and of other machines on the same host, from now on."""

    def __init__(self) -> None:
        self._begin = self._state()

    def share(self) -> float:
        """Return their share of all CPU time until now, 0 to 1, without this process and its descendants."""
        own_s, all_s, wall_s = (now - before for now, before in zip(self._state(), self._begin, strict=True))
        return min(1.0, max(0.0, all_s - own_s) / max(wall_s, 1 / _TICKS_PER_S))

    @staticmethod
    def _state() -> tuple[float, float, float]:
        """Return CPU seconds: of this process, of all processes, and elapsed on all CPUs."""
        user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9])
        busy = user + nice + system + sum(rest)  # with interrupts and time stolen by the host
        return processor_s(os.getpid()), busy / _TICKS_PER_S, (busy + idle + waiting) / _TICKS_PER_S


def end_servers_with_us() -> None:
    """Make SIGTERM end the benchmark like Ctrl+C, together with its servers."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class ServerProcess:
    """Server: `command`, with {port} replaced, runs in its own session until it is stopped. It must answer GET /health with 200
    when it is ready. TokamakError if it ends before, or is not ready within `timeout_s`."""

    def __init__(self, name: str, command: str, log: Path, timeout_s: float) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.peak_bytes = 0
        arguments = shlex.split(command.replace("{port}", str(port)))
        begin = time.monotonic()
        end_servers_with_us()
        with log.open("ab") as stream:
            self._process = subprocess.Popen(arguments, stdout=stream, stderr=stream, start_new_session=True)
        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch_memory, daemon=True)
        self._watcher.start()
        try:
            self._wait_ready(begin + timeout_s, log)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - begin

    def _wait_ready(self, deadline: float, log: Path) -> None:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise TokamakError(
                    f"{self.name} ended with exit code {self._process.returncode} before it was ready; see {log}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            self._is_stopping.wait(0.05)
        raise TokamakError(f"{self.name} was not ready in time; see {log}, or raise --start-timeout")

    def _watch_memory(self) -> None:
        while not self._is_stopping.wait(_PSS_PERIOD_S):
            self.measure_memory()

    def measure_memory(self) -> None:
        """Measure now, in addition to once a second, because a server may end earlier."""
        self.peak_bytes = max(self.peak_bytes, pss_bytes(self._process.pid))

    def stop(self) -> None:
        """Send SIGTERM to its session, and SIGKILL after a while."""
        self._is_stopping.set()
        self._watcher.join()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                self._process.wait(_STOP_TIMEOUT_S)
            return
