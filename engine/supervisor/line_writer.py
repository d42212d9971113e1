"""Writes to stdout or stderr without waiting for a slow reader, such as a full pipe or a terminal paused with Ctrl+S.

Used by the supervisor's process for everything it prints. A thread writes, so `write` never waits. Text that does not fit is
dropped and counted; when reading continues, one line says how much is missing.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 64 << 10
END_TIMEOUT_S = 1.0  # for the waiting text when the process ends


class LineWriter:
    """Writes to `descriptor`. `notice` returns the line for a number of dropped texts. `close` ends it."""

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_missing = 0  # dropped since the last notice
        self.num_dropped = 0
        self._changed = threading.Condition()
        self._is_ending = False
        self._end_s = 0.0  # monotonic: when the waiting text is given up
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Write `text` (complete lines) soon, or drop it if too much is waiting. Never waits."""
        data = text.encode(errors="replace")
        with self._changed:
            if self._num_missing or (self._waiting and self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES):
                self._num_missing += 1  # until a notice was written: lines stay in order
                self.num_dropped += 1
                return
            self._waiting.append(data)
            self._num_waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Write the waiting text, as far as it is read within `END_TIMEOUT_S`."""
        with self._changed:
            self._end_s = time.monotonic() + END_TIMEOUT_S
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S + 0.5)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (data := self._next()) is not None:
            with contextlib.suppress(OSError):  # the terminal was closed, or the disk is full; the next write may work
                write_patiently(self._descriptor, data, self._is_over)

    def _next(self) -> bytes | None:
        """Return the next text, or the notice of missing ones behind the last; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._num_missing or self._is_ending)
            if self._waiting:
                data = self._waiting.popleft()
                self._num_waiting_bytes -= len(data)
                return data
            if self._num_missing:
                data = self._notice(self._num_missing).encode()
                self._num_missing = 0
                return data
            return None

    def _is_over(self) -> bool:
        return self._is_ending and time.monotonic() > self._end_s


def write_patiently(descriptor: int, data: bytes, is_over: Callable[[], bool]) -> None:
    """Write all of `data`, however long the reader takes. Raises TimeoutError once `is_over`, and OSError if it cannot be
    written."""
    while data:
        if is_over():
            raise TimeoutError
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(100):
            with contextlib.suppress(BlockingIOError):  # others write there too
                data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
