"""Signals for a poll loop: the supervisor receives SIGINT, SIGTERM and SIGHUP this way."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalCatcher:
    """Queue of stop signals while entered; `fileno()` is readable when there are new ones."""

    def __init__(self) -> None:
        self._caught: list[signal.Signals] = []
        self._wakeup, self._notify = socket.socketpair()

    def __enter__(self) -> SignalCatcher:
        self._wakeup.setblocking(False)
        self._notify.setblocking(False)
        signal.set_wakeup_fd(self._notify.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the process ends now; nothing may interrupt the cleanup
        signal.set_wakeup_fd(-1)
        self._wakeup.close()
        self._notify.close()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def caught(self) -> list[signal.Signals]:
        """Return the signals received since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        caught, self._caught = self._caught, []
        return caught

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(signal.Signals(number))
