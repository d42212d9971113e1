"""Files of images and video that routers' requests name, in the link's media slab.

    router  Want   <-  link                    a file that is not here
    router  Piece  ->  link  ->  Prepare       media
                       link  <-  Prepared      media, which found the same facts in the bytes as the router

A file travels once: it stays after its requests, until there is no room for another one. Its name is a hash of its bytes and
settings, so it does not matter which router sent it. Nothing that a router says of a file is believed: the media process
inspects it as if a client of this engine had sent it, and the facts must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.cluster.frames import Piece, WrongFrameError
from engine.messages import MediaItem, MediaSource, Prepare, Prepared
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox
from engine.process.topology import MEDIA, actors_of, media_of
from shm.slab import SlabHandle

KEY_BYTES = 32
MAX_PARTS = 4096  # of an item: frames of a video


class _File(msgspec.Struct):
    """A file: coming, then being inspected, then known or refused."""

    told: MediaItem  # as the router described it
    source: MediaSource  # in this link's slab
    sender: str  # the router that sends it
    part: int = 0  # next byte
    offset: int = 0
    call: Prepare | None = None  # sent to a media process
    item: MediaItem | None = None  # as the media process found it
    refusal: Prepared | None = None
    num_users: int = 0


class EngineFiles:
    """All files, by key."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._slab = context.own_slab()
        self._names = actors_of(MEDIA, context.peers())
        self._outboxes = {name: BackloggedOutbox(context.outbox(name).send_bytes) for name in self._names}
        self._files: dict[bytes, _File] = {}  # those used last come last
        self._calls: dict[str, bytes] = {}  # keys of files that are being inspected
        self._num_calls = 0

    def begin(self, run: str, items: Sequence[MediaItem], num_users: int) -> tuple[list[bytes], str]:
        """Take the items of a request of the router `run` with `num_users` sequences. Return the files to ask it for, and why
        the request cannot be taken (empty: it can). Raises WrongFrameError for items that are none."""
        for item in items:
            found = self._files.get(_checked(item))
            if found is not None and not _are_equal(found.told, item):
                raise WrongFrameError("a file with the name of another one")
        wanted: list[bytes] = []
        for index, item in enumerate(items):
            key = item.unit_hashes[0]
            if key not in self._files:
                parts = self._allocate(item.source)
                if parts is None:
                    for before in items[:index]:
                        self.end([before.unit_hashes[0]] * num_users)
                    return [], "the memory of its engine for files is full; try again later"
                source = msgspec.structs.replace(item.source, api=self._context.name, parts=parts)
                self._files[key] = _File(item, source, run)
                wanted.append(key)
            found = self._files[key] = self._files.pop(key)
            found.num_users += num_users
        return wanted, ""

    def found(self, keys: Iterable[bytes]) -> list[MediaItem] | None:
        """Return the items of a request once all of them are known."""
        items = [self._files[key].item for key in keys]
        known = [item for item in items if item is not None]
        return known if len(known) == len(items) else None

    def refusal(self, keys: Iterable[bytes]) -> Prepared | None:
        """Return why an item of a request cannot be used; None: no reason is known."""
        for key in keys:
            if key not in self._files:
                return Prepared("", None, 503, "its file did not arrive; send the request again")
            if self._files[key].refusal is not None:
                return self._files[key].refusal
        return None

    def end(self, keys: Iterable[bytes]) -> None:
        """Note that a request no longer uses its files."""
        for key in keys:
            found = self._files.get(key)
            if found is None:
                continue
            found.num_users -= 1
            if found.num_users <= 0 and found.item is None:
                self._forget(key)

    def take(self, run: str, piece: Piece) -> None:
        """Take bytes of a file. Raises WrongFrameError if they are not the next ones."""
        found = self._files.get(piece.key)
        if found is None or found.sender != run or found.call is not None:
            return  # no request wants it any more, or another router sends it
        if not piece.data:
            self._forget(piece.key)
            return
        parts = found.source.parts
        end = piece.offset + len(piece.data)
        if (piece.part, piece.offset) != (found.part, found.offset) or end > parts[piece.part].num_bytes:
            raise WrongFrameError(f"bytes {piece.offset} to {end} of part {piece.part} of a file are not the next ones")
        self._slab.writable(parts[piece.part])[piece.offset : end] = piece.data
        found.offset = end
        while found.part < len(parts) and found.offset == parts[found.part].num_bytes:
            found.part, found.offset = found.part + 1, 0
        if found.part == len(parts):
            self._inspect(piece.key, found)

    def prepared(self, answer: Prepared) -> None:
        """Take what a media process found."""
        key = self._calls.pop(answer.call_id, b"")
        found = self._files.get(key)
        if found is None or found.call is None or found.call.call_id != answer.call_id:
            return
        if answer.item is not None and not _are_equal(answer.item, found.told):
            answer = Prepared(
                answer.call_id, None, 400, "the file is not what its router says; use the same version everywhere"
            )
        found.item, found.refusal = answer.item, answer if answer.item is None else None
        if not found.num_users and found.item is None:
            self._forget(key)

    def router_left(self, run: str) -> None:
        """Forget what a router was sending."""
        for key in [key for key, each in self._files.items() if each.sender == run and each.call is None]:
            self._forget(key)

    def on_peer(self, name: str) -> None:
        """Send the calls of a media process that was restarted again."""
        if name in self._outboxes:
            self._outboxes[name].clear()
            for found in self._files.values():
                if found.call is not None and found.item is None and found.refusal is None:
                    self._post(found.call)

    def flush(self) -> int:
        return sum(outbox.flush() for outbox in self._outboxes.values())

    def _inspect(self, key: bytes, found: _File) -> None:
        self._num_calls += 1
        context = self._context
        call_id = f"{context.name}.{context.epoch}.{self._num_calls}"
        found.call = Prepare(call_id, context.name, context.epoch, found.source, key.hex())
        self._calls[call_id] = key
        self._post(found.call)

    def _post(self, call: Prepare) -> None:
        self._outboxes[media_of(call.request, self._names)].post(call)

    def _allocate(self, source: MediaSource) -> tuple[SlabHandle, ...] | None:
        """Return room for an item, in place of files that no request uses if need be. None: there is none now."""
        handles: list[SlabHandle] = []
        for part in source.parts:
            while (handle := self._slab.allocate(part.num_bytes)) is None:
                unused = next((key for key, each in self._files.items() if not each.num_users and each.item is not None), None)
                if unused is None:
                    for other in handles:
                        self._slab.release(other)
                    return None
                self._forget(unused)
            handles.append(handle)
        return tuple(handles)

    def _forget(self, key: bytes) -> None:
        for handle in self._files.pop(key).source.parts:
            self._slab.release(handle)


def _checked(item: MediaItem) -> bytes:
    """Return the key of an item. Raises WrongFrameError if it has none, or parts that no file has."""
    sizes = [part.num_bytes for part in item.source.parts]
    if not item.unit_hashes or len(item.unit_hashes[0]) != KEY_BYTES:
        raise WrongFrameError("an item without a hash")
    if not 0 < len(sizes) <= MAX_PARTS or min(sizes) <= 0:
        raise WrongFrameError(f"an item of {len(sizes)} files")
    return item.unit_hashes[0]


def _are_equal(item: MediaItem, other: MediaItem) -> bool:
    """Return whether two items are the same, wherever their bytes are."""
    nowhere = MediaSource("", (), "")
    first, second = (msgspec.structs.replace(each, source=nowhere) for each in (item, other))
    return first == second and _settings_of(item.source) == _settings_of(other.source)


def _settings_of(source: MediaSource) -> tuple[object, ...]:
    return source.kind, source.is_features, source.grid_thw, source.settings, [part.num_bytes for part in source.parts]
