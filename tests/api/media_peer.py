"""The media process as an api process sees it: a peer at the rings that reads the bytes in the media slab.

A file that begins with `bad` is refused; any other is a picture of 4 x 4 patches with the hash of its bytes. While
`is_answering` is false, calls are only noted.
"""

from __future__ import annotations

import hashlib

from engine.messages import MediaItem, Message, Prepare, Prepared
from shm.errors import SharedMemoryError
from shm.extent_slab import ExtentSlab
from tests.api.peer import Peer


class MediaPeer(Peer):
    """Stand-in for the media process; `received` has every message, in order."""

    def __init__(self, run_id: str, name: str, slab: ExtentSlab, api: str = "api0") -> None:
        super().__init__(run_id, name, api)
        self.received: list[Prepare] = []
        self.contents: list[tuple[bytes, ...]] = []  # of each that was received
        self.is_answering = True
        self._slab = slab

    def take(self, message: Message) -> None:
        assert isinstance(message, Prepare), message
        try:
            parts = tuple(bytes(self._slab.read(part)) for part in message.source.parts)
        except SharedMemoryError as error:  # the request is over
            self.send(Prepared(message.call_id, None, 503, str(error)))
            return
        self.contents.append(parts)
        self.received.append(message)
        if self.is_answering:
            self.send(self.answer(message, parts))

    def answer(self, message: Prepare, parts: tuple[bytes, ...]) -> Prepared:
        if parts[0].startswith(b"bad"):
            return Prepared(message.call_id, None, 400, "this is no picture", "image_parse_error")
        grid = message.source.grid_thw or (len(parts), 4, 4)
        hashes = tuple(hashlib.blake2b(b"".join(parts), digest_size=32, key=bytes([unit])).digest() for unit in range(grid[0]))
        item = MediaItem(message.source, message.source.kind, grid, hashes, grid[1] * grid[2] // 4)
        return Prepared(message.call_id, item)
