"""Children that are forked: the first life of every actor, when the supervisor is a process of one thread.

What all actors import the supervisor has imported already, so that a forked child begins where one that is started by exec
arrives after a tenth of a second of work: half of an engine's start, with six processes on few cores. From the fork on it
differs in nothing else: `engine.child.main` with the same arguments, in the same directory and environment.

A process of several threads must not fork (what another thread held stays held for ever), and the supervisor has more as soon
as it has sockets. So later lives are started by exec (`engine/children.py`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.signals import STOP_SIGNALS

EXIT_FAILED = 1
_MAX_COMM_BYTES = 15  # of a process's name, as `ps` and `top` show it


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A child of this process, which alone may wait for it."""

    pid: int

    def wait(self) -> int:
        """Collect it when it has ended; its exit code, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def may_fork() -> bool:
    """Whether this process has one thread, those of libraries included."""
    return len(os.listdir("/proc/self/task")) == 1


def fork_actor(
    name: str, arguments: list[str], directory: Path, log: int, environment: Mapping[str, str], arena_fd: int
) -> ForkedProcess:
    """Run `engine.child.main(arguments)` in a fork with `log` as its output, and with no other descriptor than `arena_fd`."""
    gc.freeze()  # garbage of ours must not be collected there: it would close descriptors that are the child's own by then
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _live(name, arguments, directory, log, environment, arena_fd, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ForkedProcess(pid)


def _live(
    name: str,
    arguments: list[str],
    directory: Path,
    log: int,
    environment: Mapping[str, str],
    arena_fd: int,
    mask: set[signal.Signals | int],
) -> None:
    """Never returns: nothing of the supervisor's may be unwound here."""
    code = EXIT_FAILED
    try:
        _reset_signals(mask)
        _keep_descriptors(log, arena_fd)
        os.chdir(directory)
        os.environ.update(environment)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(name[:_MAX_COMM_BYTES])
        from engine.child import main  # imports the supervisor's modules: not before they are complete

        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reset_signals(mask: set[signal.Signals | int]) -> None:
    """As after exec, but that SIGINT and SIGHUP are ignored from the beginning."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _keep_descriptors(log: int, arena_fd: int) -> None:
    """Standard input is empty, output goes to `log`. Locks, sockets and pidfds of the supervisor are its own."""
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != arena_fd:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(number)
