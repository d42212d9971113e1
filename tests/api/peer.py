"""A stand-in actor at the rings of a real api process, in a thread of the test."""

from __future__ import annotations

import threading
import time

from engine.messages import Message, decode, encode
from shm.mailbox import Mailbox, MailboxSender
from tests.waiting import WATCHDOG_S


class Peer:
    """Stand-in actor that lives between `start` and `stop`. A subclass handles messages in `take`; while `is_reading` is false
    it gets none. `turn` is called after each read of the mailbox."""

    def __init__(self, run_id: str, name: str, api: str = "api0") -> None:
        self.name = name
        self.is_reading = True
        self.pause_ns = 2_000_000  # that it waits for messages before it does what else there is
        self._run_id = run_id
        self._api = api

    def start(self, epoch: int) -> None:
        self._mailbox = Mailbox.attach(self._run_id, self.name, epoch)
        self._sender = MailboxSender.attach(self._run_id, self._api, self.name, epoch)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._live, name=self.name)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()
        self._mailbox.close()
        self._sender.close()

    def send(self, message: Message) -> None:
        deadline = time.monotonic() + WATCHDOG_S
        payload = encode(message)
        while not self._sender.try_send(payload):
            assert time.monotonic() < deadline, "the api process does not read"

    def take(self, message: Message) -> None:
        """Handle a message."""

    def turn(self) -> None:
        """Do other work of a turn."""

    def _live(self) -> None:
        while not self._is_stopping:
            self._mailbox.wait(self.pause_ns)
            if self.is_reading:
                for _, payload in self._mailbox.receive():
                    self.take(decode(payload))
            self.turn()
