"""Loaded weights of a rank in memory of its card that outlives the process: a restarted worker finds them there.

Made by `workers/runners.py`. The memory is behind a descriptor. While this process lives it has the memory mapped; beyond that,
a message with the descriptor waits in a pair of sockets that the supervisor holds and every life of the rank inherits: the
kernel keeps what is in flight. A message is sent when the weights are complete, so there is never a part of them:

    {"id": ..., "key": digest of contents, precision and layout, "num_bytes": ..., "digest": of the manifest}
    descriptors: the memory, the manifest

It is taken out when its weights are no longer used (another version, sleep); the memory is free when no process maps it. Two
messages are there while new weights are loaded beside the present ones. A process that is killed while it has taken messages
out loses them, and its successor loads the weights again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import weakref
from collections.abc import Callable

import msgspec

from shm.device_memory import DeviceMemory
from shm.errors import SharedMemoryError

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 4096  # of a message


class _Entry(msgspec.Struct, frozen=True):
    """A message."""

    id: str
    key: str
    num_bytes: int
    digest: str  # of the manifest


class HeldRoom:
    """Memory at `address`, of `num_bytes`, which may be on the shelf as `id`."""

    def __init__(self, address: int, num_bytes: int, descriptor: int) -> None:
        self.address, self.num_bytes, self.descriptor = address, num_bytes, descriptor
        self.id = os.urandom(8).hex()


class WeightShelf:
    """Shelf of the rank on card `card` of the driver `library`. `inlet`, `outlet`: descriptors of the pair of sockets.
    `wait`: waits for all work of the card."""

    def __init__(self, library: str, card: int, inlet: int, outlet: int, wait: Callable[[], None]) -> None:
        self._memory, self._wait = DeviceMemory(library, card), wait
        self._inlet, self._outlet = inlet, outlet
        self.num_bytes = 0  # mapped
        self._own: set[str] = set()  # ids of rooms that are mapped

    def room(self, num_bytes: int) -> HeldRoom | None:
        """Return new memory; None: the driver cannot share it, or the card has no room, which the log says."""
        try:
            descriptor = self._memory.allocate(num_bytes)
            try:
                return self._mapped(descriptor, num_bytes)
            except SharedMemoryError:
                os.close(descriptor)
                raise
        except SharedMemoryError as error:
            _LOG.warning("weights on the card end with this worker, because their memory cannot be shared: %s", error)
            return None

    def keep(self, room: object, key: str, manifest: bytes) -> None:
        """Put complete weights on the shelf. No effect if they are in other memory than its own."""
        if not isinstance(room, HeldRoom):
            return
        self._wait()
        entry = _Entry(room.id, key, room.num_bytes, _digest(manifest))
        file = os.memfd_create("weights-manifest", os.MFD_CLOEXEC)
        with open(file, "wb", closefd=False) as content:
            content.write(manifest)
        self._put(entry, [room.descriptor, file])
        os.close(file)

    def find(self, key: str) -> tuple[HeldRoom, bytes] | None:
        """Take what was kept under `key` into use. Other weights are dropped, unless this process uses them."""
        found = None
        for entry, descriptors in self._take_all():
            memory, file = descriptors
            if entry.id in self._own:
                self._put(entry, descriptors)
            with open(file, "rb") as content:
                manifest = os.pread(content.fileno(), os.fstat(file).st_size, 0)
            if found is None and entry.key == key and _digest(manifest) == entry.digest:
                with contextlib.suppress(SharedMemoryError):
                    found = self._mapped(memory, entry.num_bytes), manifest
                    continue
            os.close(memory)
        if found is not None:
            self.keep(found[0], key, found[1])
        return found

    def _mapped(self, descriptor: int, num_bytes: int) -> HeldRoom:
        room = HeldRoom(self._memory.map(descriptor, num_bytes), num_bytes, descriptor)
        self.num_bytes += num_bytes
        self._own.add(room.id)
        # not at the end of the process: its successor wants them
        weakref.finalize(room, self._release, room.address, num_bytes, descriptor, room.id).atexit = False
        return room

    def _release(self, address: int, num_bytes: int, descriptor: int, id: str) -> None:
        """Free the memory, which nothing here uses any more."""
        for entry, descriptors in self._take_all():
            if entry.id != id:
                self._put(entry, descriptors)
            for each in descriptors:
                os.close(each)
        self._wait()
        self._memory.unmap(address, num_bytes)
        os.close(descriptor)
        self.num_bytes -= num_bytes
        self._own.remove(id)

    def _put(self, entry: _Entry, descriptors: list[int]) -> None:
        try:
            with _opened(self._inlet) as inlet:
                socket.send_fds(inlet, [msgspec.json.encode(entry)], descriptors)
        except OSError as error:
            _LOG.warning("weights on the card end with this worker: %s", error)

    def _take_all(self) -> list[tuple[_Entry, list[int]]]:
        taken: list[tuple[_Entry, list[int]]] = []
        with _opened(self._outlet) as outlet:
            while True:
                try:
                    content, descriptors, _, _ = socket.recv_fds(outlet, _MAX_BYTES, 2)
                except BlockingIOError:
                    return taken
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                if len(descriptors) == 2:
                    taken.append((msgspec.json.decode(content, type=_Entry), list(descriptors)))
                else:  # too many are open in this process
                    for descriptor in descriptors:
                        os.close(descriptor)


def _opened(descriptor: int) -> socket.socket:
    """Return a copy of the socket whose calls do not wait. Python's functions for descriptors ignore flags of a call."""
    opened = socket.socket(fileno=os.dup(descriptor))
    opened.setblocking(False)
    return opened


def _digest(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()
