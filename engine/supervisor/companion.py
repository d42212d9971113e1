"""`--end-with PID`: the engine ends when that process has, however it ended.

A thread waits on a pidfd and then asks the launcher to end as an operator would, by SIGTERM: before there is a run that kills
it at once, afterwards the supervisor stops in order. PR_SET_PDEATHSIG, by which children end with the supervisor, would not do
here: it fires when the *thread* ends that started the engine, as in a notebook, and leaves no time to clear away.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from engine.errors import StartError


def end_with(pid: int) -> None:
    """End with process `pid` from now on. StartError: there is no such process (any more)."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise StartError(f"--end-with {pid}: {error.strerror}; pass the pid of a running process") from error
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # whoever started this may have blocked or ignored it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_wait, args=(pidfd,), name="companion", daemon=True).start()


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
