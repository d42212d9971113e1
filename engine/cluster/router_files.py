"""Files of images and video in the link of a router.

It reads them in the memory of its api processes, and sends them to an engine that wants them, in pieces between other frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.cluster.frames import MAX_PIECE_BYTES, Piece
from engine.cluster.remote_engine import Session
from engine.messages import MediaItem
from engine.process.context import ActorContext
from engine.process.topology import actors_of
from shm.errors import SharedMemoryError

MAX_KNOWN = 4096  # files per session; older ones are no longer sent


class RouterFiles:
    """The media memory of all api processes."""

    def __init__(self, context: ActorContext) -> None:
        self._slabs = {api: context.media_slab(api) for api in actors_of("api", context.peers())}

    def note(self, session: Session, items: Iterable[MediaItem]) -> None:
        """Note the files of a request that is sent."""
        for item in items:
            key = item.unit_hashes[0]
            session.files.pop(key, None)
            session.files[key] = item.source
        while len(session.files) > MAX_KNOWN:
            del session.files[next(iter(session.files))]

    def pieces(self, session: Session, key: bytes) -> Iterator[Piece]:
        """Yield a file in pieces; an empty one if its request has ended meanwhile."""
        source = session.files.get(key)
        try:
            for part, handle in enumerate(source.parts if source is not None else ()):
                data = self._slabs[source.api].read(handle) if source is not None else b""
                for offset in range(0, len(data), MAX_PIECE_BYTES):
                    yield Piece(key, part, offset, bytes(data[offset : offset + MAX_PIECE_BYTES]))
        except SharedMemoryError:
            source = None
        if source is None:
            yield Piece(key, 0, 0, b"")
