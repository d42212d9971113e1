"""Ways to send bytes from one Python process to another, behind one interface, for `tokamak bench shm`.

A route is unidirectional. Each process opens its end; every payload begins with the sender's clock.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from functools import cached_property

import zmq

from shm.mailbox import Mailbox, MailboxSender
from shm.segment import MemoryFile
from shm.slab import PRODUCER, Slab, SlabHandle

STAMP = struct.Struct("<q")
HANDLE = struct.Struct("<4Q")
RING_BYTES = 1 << 20
MAX_SLEEP_NS = 100_000_000
NUM_SLOTS = 8


class Route(ABC):
    """One direction between two processes."""

    @abstractmethod
    def send(self, payload: bytearray) -> None:
        """Send `payload`, which may be changed afterwards; waits while the route is full."""

    @abstractmethod
    def receive(self) -> int:
        """Wait for a payload and return the clock in its first bytes."""

    @abstractmethod
    def remove(self) -> None:
        """Remove all resources. Called in the process that created the route."""


class RingRoute(Route):
    """Tokamak's mailbox; the reader spins for `spin_ns` before it sleeps."""

    def __init__(self, run_id: str, name: str, spin_ns: int) -> None:
        self._names = (run_id, name)
        self._spin_ns = spin_ns
        self._created = Mailbox.create(run_id, name, ["sender"], RING_BYTES)
        self._taken: deque[bytes] = deque()

    @cached_property
    def _sender(self) -> MailboxSender:
        return MailboxSender.attach(*self._names, "sender", epoch=1)

    @cached_property
    def _mailbox(self) -> Mailbox:
        mailbox = Mailbox.attach(*self._names, epoch=1)
        mailbox.spin_ns = self._spin_ns
        return mailbox

    def send(self, payload: bytes | bytearray) -> None:
        while not self._sender.try_send(payload):
            os.sched_yield()

    def receive_payload(self) -> bytes:
        while not self._taken:
            self._mailbox.wait(MAX_SLEEP_NS)
            self._taken.extend(payload for _, payload in self._mailbox.receive())
        return self._taken.popleft()

    def receive(self) -> int:
        stamp: int = STAMP.unpack_from(self.receive_payload())[0]
        return stamp

    def remove(self) -> None:
        self._created.unlink()


class SlabRoute(Route):
    """Tokamak's slab: the payload is written into a slot, its handle is sent through a mailbox, and the reader reads it in
    place."""

    def __init__(self, run_id: str, name: str, spin_ns: int, num_bytes: int) -> None:
        self._handles = RingRoute(run_id, name, spin_ns)
        slots = {num_bytes: NUM_SLOTS}
        self._memory = MemoryFile.create("bench", Slab.num_bytes_of(slots))
        self._producer = Slab.create(self._memory, run_id, 0, slots)

    @cached_property
    def _consumer(self) -> Slab:
        return Slab.attach(self._memory, holder=0)

    def send(self, payload: bytearray) -> None:
        while (handle := self._producer.put(payload, [0])) is None:
            os.sched_yield()
        self._handles.send(HANDLE.pack(handle.slab, handle.slot, handle.generation, handle.num_bytes))
        self._producer.release(handle)

    def receive(self) -> int:
        handle = SlabHandle(*HANDLE.unpack(self._handles.receive_payload()))
        stamp: int = STAMP.unpack_from(self._consumer.view(handle))[0]
        self._consumer.release(handle)
        return stamp

    def remove(self) -> None:
        self._producer.clear_consumer(PRODUCER)
        self._handles.remove()


class ZeroMQRoute(Route):
    """pyzmq, PUSH and PULL over ipc://. The receiver binds; large frames are received without a copy."""

    def __init__(self, endpoint: str, num_bytes: int) -> None:
        self._endpoint = endpoint
        self._copy = num_bytes < 65536

    @cached_property
    def _push(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(self._endpoint)
        return socket

    @cached_property
    def _pull(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(self._endpoint)
        return socket

    def send(self, payload: bytearray) -> None:
        self._push.send(payload)

    def receive(self) -> int:
        frame = self._pull.recv(copy=self._copy)
        stamp: int = STAMP.unpack_from(frame if isinstance(frame, bytes) else frame.buffer)[0]
        return stamp

    def remove(self) -> None:
        """The sockets end with their processes, their file with its directory."""


class QueueRoute(Route):
    """multiprocessing.Queue."""

    def __init__(self) -> None:
        self._queue: multiprocessing.Queue[bytes] = multiprocessing.get_context("fork").Queue()

    def send(self, payload: bytearray) -> None:
        self._queue.put(bytes(payload))

    def receive(self) -> int:
        stamp: int = STAMP.unpack_from(self._queue.get())[0]
        return stamp

    def remove(self) -> None:
        self._queue.close()


def stamped(payload: bytearray) -> bytearray:
    """Return the payload with the current clock."""
    STAMP.pack_into(payload, 0, time.monotonic_ns())
    return payload
