"""Messages of actors to their supervisor: READY, FAILED, memberships, replies to commands.

    actor's EventSender  --- one pair of sockets for all actors --->  supervisor's EventChannel

Each child inherits the end that is written to. A pair of SOCK_SEQPACKET keeps records whole whoever writes, holds what was
written before its writer died, and has no name that somebody could remove; and actors need neither modules nor threads for it.
"""

from __future__ import annotations

import os
import struct

from engine.messages import Control, Reply, decode_control, encode

SEND_TIMEOUT_S = 1  # of an actor whose supervisor does not listen
MAX_EVENT_BYTES = 1 << 20  # more than a socket takes at once, unless somebody made its buffer larger
MAX_ANSWER_CHARACTERS = 8192  # of an answer to an order: what is said of a checkpoint may quote it


class EventSender:
    """An actor's end, `descriptor`, which belongs to the code that made it and closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: Control) -> None:
        """Hand `event` over. OSError: the supervisor has read nothing for a second, or is gone."""
        if isinstance(event, Reply):
            event.message = event.message[:MAX_ANSWER_CHARACTERS]
        os.write(self._descriptor, encode(event))


class EventChannel:
    """The supervisor's end; `sender` is the descriptor of the other."""

    def __init__(self) -> None:
        import socket  # milliseconds of each actor's start, which none of them needs for this

        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver.setblocking(False)
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self.sender = self._sender.fileno()

    def fileno(self) -> int:
        """Readable where there are events."""
        return self._receiver.fileno()

    def received(self) -> list[Control]:
        """Return the messages that came since the last call, also from actors that have died."""
        events = []
        while True:
            try:
                events.append(decode_control(self._receiver.recv(MAX_EVENT_BYTES)))
            except BlockingIOError:
                return events

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
