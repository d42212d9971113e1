"""A thread that waits for an actor's mailbox, for actors whose loop also waits for descriptors.

A mailbox wakes its reader by a futex, and a loop that sleeps on sockets cannot wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.process.actor import LOOK_INTERVAL_NS
from shm.mailbox import Mailbox

TAKE_TIMEOUT_S = 1.0  # longest wait for the loop, even for a busy one


class MailboxWaiter:
    """Calls `on_mail` in its thread, once per awakening; then it waits until the loop calls `resume`."""

    def __init__(self, mailbox: Mailbox, on_mail: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._on_mail = on_mail
        self._is_taken = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._wait, name="mailbox", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Wait for mail again, after what had come was taken."""
        self._is_taken.set()

    def close(self) -> None:
        self._is_stopping = True
        self._is_taken.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._is_stopping:
            if self._mailbox.wait(LOOK_INTERVAL_NS):
                self._is_taken.clear()
                self._on_mail()
                self._is_taken.wait(TAKE_TIMEOUT_S)
