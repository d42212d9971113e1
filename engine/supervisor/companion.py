"""`--end-with PID`: the engine ends when that process ends, for whatever reason.

A thread waits on a pidfd and then sends the launcher SIGTERM, as an operator would: before there is a run this kills it at
once, afterwards the supervisor stops in order. PR_SET_PDEATHSIG, by which children end with the supervisor, does not work here:
it fires when the *thread* ends that started the engine, as in a notebook, and leaves no time to clean up.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from engine.errors import StartError


def end_with(pid: int) -> None:
    """End with process `pid` from now on. Raises StartError if there is no such process."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise StartError(f"--end-with {pid}: {error.strerror}; pass the pid of a running process") from error
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the parent process may have blocked or ignored it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_wait, args=(pidfd,), name="companion", daemon=True).start()


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
