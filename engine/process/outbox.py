"""One actor's ring in another's mailbox: sending never blocks, a full ring says so.

Made by `ActorContext.outbox` in every child process.
"""

from __future__ import annotations

from engine.messages import Message, encode
from shm.counters import Cell
from shm.mailbox import MailboxSender


class Outbox:
    """This actor's ring in another's mailbox. It stays the same ring when the other is started again."""

    __slots__ = ("_full", "_sender", "_sent", "receiver")

    def __init__(self, receiver: str, sender: MailboxSender, sent: Cell, full: Cell) -> None:
        """`sent` counts messages, `full` the attempts that found no room."""
        self.receiver = receiver
        self._sender = sender
        self._sent = sent
        self._full = full

    def send(self, message: Message) -> bool:
        """Put `message` on the ring; False when the ring has no room now. Never blocks."""
        return self.send_bytes(encode(message))

    def send_bytes(self, payload: bytes) -> bool:
        """`send` of a message that is encoded already (to see its size against `max_record_bytes` first)."""
        if self._sender.try_send(payload):
            self._sent.add(1)
            return True
        self._full.add(1)
        return False

    @property
    def max_record_bytes(self) -> int:
        """The longest encoded message that the ring can ever take."""
        return self._sender.max_record_bytes

    @property
    def fill_bytes(self) -> int:
        return self._sender.fill_bytes

    def close(self) -> None:
        self._sender.close()
