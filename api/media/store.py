"""The bytes of images and video while their requests are open, and the facts from the media processes.

Lives in the event loop of the api process, one for all requests. It is the producer of this process's media slab: files stay
there until their request ends, so that lost pixels can be decoded again. It knows which media process got a call; if that
restarts, the call is sent again. A request has one call open at a time.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec

from engine.errors import RequestError
from engine.messages import MediaItem, MediaSource, Prepare, Prepared, encode
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox
from engine.process.topology import MEDIA, media_of, names_of
from shm.sizes import size_text
from shm.slab import SlabHandle

RETRY_AFTER_S = 1


class _Call(msgspec.Struct):
    message: Prepare
    media: str
    answer: asyncio.Future[Prepared]


class MediaStore:
    def __init__(self, context: ActorContext) -> None:
        self._name = context.name
        self._epoch = context.epoch
        self._slab = context.own_slab()
        names = names_of(MEDIA, context.config.media_processes)
        self._outboxes = {name: BackloggedOutbox(context.outbox(name).send_bytes) for name in names}
        self._max_record_bytes = min(context.outbox(name).max_record_bytes for name in names)
        self._calls: dict[str, _Call] = {}
        self._call_ids = itertools.count()
        self._num_coming_bytes = 0  # of links being fetched
        self._num_held_bytes = context.counter("media_held_bytes")

    def hold(self, request: str, deadline_ns: int = 0) -> MediaLease:
        """Return a lease for one request; after its deadline (0: none) nothing waits for its contents."""
        return MediaLease(self, request, deadline_ns)

    def allocate(self, num_bytes: int) -> SlabHandle:
        """Allocate room in the slab. Raises RequestError (429) if there is none now."""
        handle = self._slab.allocate(num_bytes)
        if handle is None:
            raise self._full(self._slab.num_used_bytes, num_bytes)
        self._count()
        return handle

    def writable(self, handle: SlabHandle) -> memoryview:
        return self._slab.writable(handle)

    def expect(self, num_bytes: int) -> None:
        """Count bytes of an incomplete link, which are not in the slab yet; a negative number: they moved there, or were
        dropped. Raises RequestError (429) if they would not fit: slow links take no more memory than complete files."""
        num_used = self._slab.num_used_bytes + self._num_coming_bytes
        if num_bytes > 0 and num_used + num_bytes > self._slab.capacity_bytes:
            raise self._full(num_used, num_bytes)
        self._num_coming_bytes += num_bytes
        self._count()

    def _full(self, num_used: int, num_bytes: int) -> RequestError:
        return RequestError(
            (
                f"media memory is full: files of open requests take {size_text(num_used)} of "
                f"{size_text(self._slab.capacity_bytes)}, no room for {size_text(num_bytes)} more; try again later, "
                "or start the server with a larger --media-memory"
            ),
            status=429,
            code="media_memory_full",
            retry_after_s=RETRY_AFTER_S,
        )

    def release(self, handles: list[SlabHandle]) -> None:
        for handle in handles:
            self._slab.release(handle)
        self._count()

    def _count(self) -> None:
        self._num_held_bytes.set(self._slab.num_used_bytes + self._num_coming_bytes)

    async def prepare(self, source: MediaSource, request: str, deadline_ns: int) -> MediaItem:
        """Return the facts of an item. Raises RequestError if the model cannot read it."""
        call_id = f"{self._name}.{self._epoch}.{next(self._call_ids)}"
        media = media_of(request, list(self._outboxes))
        message = Prepare(call_id, self._name, self._epoch, source, request, deadline_ns)
        record = encode(message)
        if len(record) > self._max_record_bytes:
            raise RequestError(
                (
                    f"the item is too large: {len(source.parts)} files and {len(source.settings)} bytes of settings take "
                    f"a record of {len(record)} bytes, limit {self._max_record_bytes}; send fewer frames, and only "
                    "settings that exist"
                ),
                code="invalid_value",
            )
        call = self._calls[call_id] = _Call(message, media, asyncio.get_running_loop().create_future())
        self._outboxes[media].post_records([record])
        self.flush()
        try:
            prepared = await call.answer
        finally:
            del self._calls[call_id]
        if prepared.item is None:
            raise RequestError(
                prepared.message,
                status=prepared.status,
                code=prepared.code,
                retry_after_s=RETRY_AFTER_S if prepared.status in (429, 503) else 0,
            )
        return prepared.item

    # -------------------------------------------------------------------------------------------------- for the actor

    def on_prepared(self, message: Prepared) -> None:
        call = self._calls.get(message.call_id)
        if call is not None and not call.answer.done():
            call.answer.set_result(message)

    def on_peer(self, name: str) -> None:
        """Handle a media process's restart: send its calls again."""
        outbox = self._outboxes.get(name)
        if outbox is not None:
            outbox.clear()
            outbox.post(*(call.message for call in self._calls.values() if call.media == name))
            self.flush()

    def flush(self) -> None:
        """Send as much as fits."""
        for outbox in self._outboxes.values():
            outbox.flush()


class MediaLease:
    """Part of the slab held by one request, and the facts of its items."""

    def __init__(self, store: MediaStore | None = None, request: str = "", deadline_ns: int = 0) -> None:
        self.items: list[MediaItem] = []
        self.deadline_ns = deadline_ns
        self._store = store
        self._request = request
        self._is_asking = asyncio.Lock()
        self._handles: list[SlabHandle] = []

    def allocate(self, num_bytes: int) -> tuple[SlabHandle, memoryview]:
        """Allocate room until `release`, to be filled at once."""
        assert self._store is not None
        handle = self._store.allocate(num_bytes)
        self._handles.append(handle)
        return handle, self._store.writable(handle)

    async def prepare(self, source: MediaSource) -> MediaItem:
        """Prepare an item (`MediaStore.prepare`). Files of one request are prepared one after another."""
        assert self._store is not None
        async with self._is_asking:
            return await self._store.prepare(source, self._request, self.deadline_ns)

    def release(self) -> None:
        """Release everything. Harmless if called again."""
        if self._store is not None and self._handles:
            self._store.release(self._handles)
            self._handles = []
