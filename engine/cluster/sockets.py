"""ZeroMQ sockets of links, and how their loop waits for messages of both kinds.

A link sleeps on sockets (descriptors) and on its mailbox (a futex) at once: a thread waits for the mailbox and then makes a
descriptor readable.
"""

from __future__ import annotations

import os

import zmq

from engine.cluster.frames import MAX_REQUEST_BYTES, MAX_WELCOME_BYTES
from engine.cluster.key import CurveKeys
from engine.errors import StartError
from engine.process.mailbox_waiter import MailboxWaiter
from shm.mailbox import Mailbox

Socket = zmq.Socket[bytes]

HANDSHAKE_MS = 3000
_QUEUED_FRAMES = 256  # sent but not read, of a connection; then the sender keeps its frames
_READ_FRAMES = 32  # received but not taken: of the largest size they are half a gigabyte


class LinkPoller:
    """Sleeps until a socket, or the mailbox, has something."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._poller = zmq.Poller()
        self._mail = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._mail, zmq.POLLIN)
        self._waiter = MailboxWaiter(mailbox, lambda: os.eventfd_write(self._mail, 1))

    def add(self, socket: Socket) -> None:
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: Socket) -> None:
        self._poller.unregister(socket)

    def wait(self, timeout_ns: int) -> None:
        """Sleep until there is something, at most `timeout_ns`."""
        self._waiter.resume()
        ready = self._poller.poll(max(0, -(-timeout_ns // 1_000_000)))
        if any(source == self._mail for source, _ in ready):
            os.eventfd_read(self._mail)

    def close(self) -> None:
        self._waiter.close()
        os.close(self._mail)


def listen(context: zmq.Context[Socket], address: str, keys: CurveKeys | None) -> Socket:
    """Return an engine's socket, bound to `address`. Raises StartError."""
    socket = context.socket(zmq.ROUTER)
    _limit(socket, MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a router that is gone, or does not read, fails
    socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = keys.engine_secret, keys.engine_public
        socket.setsockopt(zmq.ZAP_DOMAIN, b"cluster")
    try:
        socket.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        socket.close(0)
        raise StartError(f"cannot listen for routers on {address}: {error}; choose another --cluster-listen") from error
    return socket


def dealer(context: zmq.Context[Socket], keys: CurveKeys | None) -> Socket:
    """Return a router's socket, to be connected to an engine. It connects once: whoever uses it makes another when it has
    failed."""
    socket = context.socket(zmq.DEALER)
    _limit(socket, MAX_WELCOME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a connection that does not exist
    socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey = keys.router_secret, keys.router_public
        socket.curve_serverkey = keys.engine_public
    return socket


def _limit(socket: Socket, max_received_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_received_bytes)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, _READ_FRAMES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class KeyGate:
    """Answers ZeroMQ's question (ZAP, RFC 27) whether a connection may exist: only routers with the cluster key."""

    def __init__(self, context: zmq.Context[Socket], keys: CurveKeys) -> None:
        from zmq.utils import z85

        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self._accepted = z85.decode(keys.router_public)

    def answer(self) -> int:
        """Answer the waiting questions; return how many."""
        num_done = 0
        while self.socket.poll(0):
            version, sequence, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
            is_accepted = mechanism == b"CURVE" and credentials == [self._accepted]
            verdict = [b"200", b"OK"] if is_accepted else [b"400", b"the cluster key is not ours"]
            self.socket.send_multipart([version, sequence, *verdict, b"", b""])
            num_done += 1
        return num_done

    def close(self) -> None:
        self.socket.close(0)
