"""A child process of the supervisor: started by exec, watched by pidfd, with stderr in its own log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.installation import python_environment
from engine.keys import environment_of
from engine.process.run_directory import Run
from engine.process.segments import RunSegments
from engine.process.topology import ActorLife, ActorPlan, role_of
from engine.supervisor.hangs import HangWatch
from shm.process import ProcessIdentity

LAST_LINES = 20
_MAX_TAIL_BYTES = 64 << 10


class Child(msgspec.Struct):
    """One life of one actor. `pidfd` is readable once it has ended."""

    plan: ActorPlan
    epoch: int
    process: subprocess.Popen[bytes]
    identity: ProcessIdentity
    pidfd: int
    log_path: Path
    log_start: int  # where this life begins in the log
    watch: HangWatch
    ready_s: float = 0.0  # monotonic: since when it accepts work
    failure: str = ""  # announced before it ended
    is_failure_from_outside: bool = False
    is_mistake: bool = False  # of the user: exit code 2
    takes_part: bool = True  # in its rank group, once it is ready
    is_asked_to_end: bool = False  # by an operator, so not a crash
    kill_at_s: float = float("inf")  # monotonic: when SIGKILL follows SIGTERM

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def is_ready(self) -> bool:
        return self.ready_s > 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Signal exactly this process, never one that took its pid over."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended; its pidfd reports that
            signal.pidfd_send_signal(self.pidfd, number)

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM now, SIGKILL after `kill_at_s`."""
        self.kill_at_s = time.monotonic() + grace_s
        self.send_signal(signal.SIGTERM)

    def reap(self) -> int:
        """Collect the ended process; return its exit code, negative for a signal."""
        code = self.process.wait()
        os.close(self.pidfd)
        return code

    def last_lines(self) -> list[str]:
        """Return the end of the log of this life; its file may have been removed."""
        with contextlib.suppress(OSError), open(self.log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, end - _MAX_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return []


def spawn(
    run: Run,
    config: EngineConfig,
    plan: ActorPlan,
    epoch: int,
    segments: RunSegments,
    events_fd: int,
    listener_fd: int = -1,
) -> Child:
    """Start `plan` with `epoch`; `events_fd`: socket for its events. `listener_fd`: listening socket of api processes. Raises
    OSError if there is no process, descriptor or space left; then nothing was started."""
    arena, comm, media = segments.arena_of(plan.name), segments.comm_of(plan.name), segments.media_memory_of(plan.name)
    arena_fd, comm_fd = (-1 if memory is None else memory.fd for memory in (arena, comm))
    media_fds = {name: memory.fd for name, memory in media.items()}
    named = segments.descriptors
    listener_fd = listener_fd if role_of(plan.name) == "api" else -1
    card_fd = segments.device_arena_of(plan.name)
    shelf = segments.weight_shelf_of(plan.name)
    fds = (named, arena_fd, card_fd, shelf, comm_fd, media_fds, events_fd, listener_fd)
    life = ActorLife(str(run.directory), plan.name, epoch, os.getpid(), *fds)
    inherited = (*named.values(), arena_fd, card_fd, *shelf, comm_fd, *media_fds.values(), events_fd, listener_fd)
    command = [sys.executable, "-m", "engine.process", msgspec.json.encode(life).decode()]
    log_path = run.log_path(plan.name)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        log_start = os.fstat(log).st_size
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=run.directory,  # `-m` puts it on sys.path: private, and without modules
            env=_environment(config, role_of(plan.name)),
            pass_fds=[fd for fd in inherited if fd >= 0],
        )
    finally:
        os.close(log)
    try:
        identity, pidfd = ProcessIdentity.of(process.pid), os.pidfd_open(process.pid)
    except OSError:  # it could not be watched
        process.kill()
        process.wait()
        raise
    return Child(plan, epoch, process, identity, pidfd, log_path, log_start, HangWatch(time.monotonic_ns()))


def describe_exit(code: int) -> str:
    """Return `killed by SIGKILL` or `exit code 1`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _environment(config: EngineConfig, role: str) -> dict[str, str]:
    """Return the supervisor's environment with the settings that native libraries read at load time: their threads, and no
    telemetry."""
    threads = str(config.threads if role == "worker" else 1)
    return {
        **python_environment(environment_of(config, role, os.environ)),
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
