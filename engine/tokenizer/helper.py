"""A process that works on text for a tokenizer, one job at a time, so that no job can delay the tokenizer's loop.

Forked by the tokenizer's main thread when there is work (`lanes.py`); it shares the vocabulary's memory, has its own socket
pair to the parent, and uses no rings. The kernel ends it when the parent ends, at a job's limit of CPU time, and when it
exceeds its memory limit; the parent ends it at a job's limit of wall time. Only the job is lost.

    parent -> helper   length u64 | job           helper -> parent   length u64 | answer
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from shm._native import set_parent_death_signal

MAX_MEMORY_BYTES = 2 << 30  # in addition to the tokenizer's
MIN_CPU_SECONDS = 4  # for a job; more for a longer one
BYTES_PER_CPU_SECOND = 64 << 10
WALL_SECONDS_PER_CPU_SECOND = 6  # other programs may use the machine
RECEIVE_BYTES = 1 << 20

_LENGTH = struct.Struct("<Q")
_PAGE_BYTES = resource.getpagesize()

Work = Callable[[bytes], bytes]


class HelperEnded(Exception):
    """The helper has ended and its job was not done. The message is for users."""

    def __init__(self, reason: str, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.was_killed = was_killed  # from outside: the job may succeed with another helper


class Helper:
    """The parent's end. Nothing here blocks."""

    def __init__(self, work: Work) -> None:
        """`work` turns a job into an answer; it runs in the new process."""
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        with theirs, warnings.catch_warnings():
            # about fork with threads; none of our threads holds a Python lock
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                self._socket.close()
                _live(theirs, work, parent)
        self._socket.setblocking(False)
        self.has_worked = False  # it has loaded what its first job needed
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._deadline_ns = 0
        self._max_cpu_s = 0

    def begin(self, job: bytes) -> None:
        """Send it the next job."""
        self._unsent = memoryview(_LENGTH.pack(len(job)) + job)
        self._received.clear()
        self._begun_cpu_ns = self._cpu_ns()
        self._max_cpu_s = max_cpu_seconds(len(job))
        self._deadline_ns = time.monotonic_ns() + self._max_cpu_s * WALL_SECONDS_PER_CPU_SECOND * 1_000_000_000

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, for whatever reason. Without a job, no job is to blame."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def job_cpu_ns(self) -> int:
        """CPU time that its job has used, regardless of other work of the machine."""
        return self._cpu_ns() - self._begun_cpu_ns

    def _cpu_ns(self) -> int:
        with contextlib.suppress(OSError):
            return time.clock_gettime_ns(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        return 0

    def poll(self) -> bytes | None:
        """Return the answer once it has arrived. Raises HelperEnded if there will be none."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            while (missing := self._num_missing()) and (part := self._socket.recv(min(missing, RECEIVE_BYTES))):
                self._received += part
        except BlockingIOError:
            if time.monotonic_ns() > self._deadline_ns:
                self.end()
                raise HelperEnded(f"it takes more than {self._max_cpu_s * WALL_SECONDS_PER_CPU_SECOND} s") from None
            return None
        except OSError:
            missing = 1
        if missing:
            raise self._ending()
        return bytes(self._received[_LENGTH.size :])

    def end(self) -> int:
        """Kill it; return its exit status."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):  # not waited for yet, so the pid is still its own
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _num_missing(self) -> int:
        """Bytes that are still missing, as far as known."""
        if len(self._received) < _LENGTH.size:
            return _LENGTH.size - len(self._received)
        return int(_LENGTH.unpack_from(self._received)[0]) + _LENGTH.size - len(self._received)

    def _ending(self) -> HelperEnded:
        """Return the error for a closed socket: the helper has ended or is about to."""
        self._socket.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == -signal.SIGXCPU:
            return HelperEnded(f"it takes more than {self._max_cpu_s} s of CPU time")
        end = f"exit code {code}" if code >= 0 else f"signal {-code}"
        reason = f"it needs more than {MAX_MEMORY_BYTES} bytes of memory, or it crashes the tokenizer ({end})"
        return HelperEnded(reason, was_killed=code == -signal.SIGKILL)


def max_cpu_seconds(num_bytes: int) -> int:
    """Return the limit of CPU time for a job of `num_bytes`."""
    return MIN_CPU_SECONDS + num_bytes // BYTES_PER_CPU_SECOND


def _live(connection: socket.socket, work: Work, parent: int) -> NoReturn:
    """Run the helper until its end."""
    try:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _bound_memory()
        while True:
            job = _read(connection, _LENGTH.unpack(_read(connection, _LENGTH.size))[0])
            _bound_processor_time(max_cpu_seconds(len(job)))
            answer = work(job)
            connection.sendall(_LENGTH.pack(len(answer)))
            connection.sendall(answer)
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(num_bytes - len(parts), RECEIVE_BYTES))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _bound_memory() -> None:
    with open("/proc/self/statm", "rb") as statm:
        bound = int(statm.read().split()[5]) * _PAGE_BYTES + MAX_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def _bound_processor_time(seconds: int) -> None:
    """Make the kernel end the process by SIGXCPU after this much more CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    bound = used + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
