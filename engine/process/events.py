"""Messages of actors to their supervisor: READY, FAILED, memberships, replies to commands.

    actor's EventSender  --- one pair of sockets for all actors --->  supervisor's EventChannel

Each child inherits the writing end. A SOCK_SEQPACKET pair keeps the records of several writers whole, keeps records whose
writer has died, and has no name that could be removed; and actors need no modules or threads for it.
"""

from __future__ import annotations

import os
import struct

from engine.messages import Control, Reply, decode_control, encode

SEND_TIMEOUT_S = 1  # of an actor if the supervisor does not read
MAX_EVENT_BYTES = 1 << 20  # more than a socket accepts at once with its default buffer
MAX_ANSWER_CHARACTERS = 8192  # of a reply to a command: texts about a checkpoint may quote it


class EventSender:
    """An actor's end. `descriptor` belongs to the code that created it and closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: Control) -> None:
        """Send `event`. Raises OSError if the supervisor has read nothing for a second, or is gone."""
        if isinstance(event, Reply):
            event.message = event.message[:MAX_ANSWER_CHARACTERS]
        os.write(self._descriptor, encode(event))


class EventChannel:
    """The supervisor's end; `sender` is the descriptor of the other."""

    def __init__(self) -> None:
        import socket  # takes milliseconds of a start, and actors do not need it

        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver.setblocking(False)
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self.sender = self._sender.fileno()

    def fileno(self) -> int:
        """Return the descriptor, readable when there are events."""
        return self._receiver.fileno()

    def received(self) -> list[Control]:
        """Return the messages received since the last call, including those of actors that have died."""
        events = []
        while True:
            try:
                events.append(decode_control(self._receiver.recv(MAX_EVENT_BYTES)))
            except BlockingIOError:
                return events

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
