"""Responses with `background: true`: generated while no client waits. Owned by one api process, at first the one that got the
request.

A response is a file from the beginning (`store.py`), so that every api process can return it. So are its request, and the
events of a response with `stream: true`, from which a stream continues where a client lost it. Its request is like any other
open one: it survives the death of other actors. If its own api process dies, the first one that notices claims it and generates
it again (`takeover.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Protocol

import msgspec

from api.client.generation import Generation
from api.growing_waits import growing_waits
from api.responses.store import MAX_RESPONSE_BYTES, ResponseStore, StoredRequest, StoredResponse
from api.schemas.requests import invalid
from engine.errors import RequestError
from engine.process.context import ActorContext
from engine.process.shares import has_room

if TYPE_CHECKING:
    from api.responses.answers import OpenAIResponse  # of routes that most engines never use

MAX_OPEN = 64  # of a single source; twice as many in total
TOUCH_INTERVAL_NS = 1_000_000_000
_BUSY = (429, 503)


class Writer(Protocol):
    """The part of `response.ResponseWriter` used here."""

    response: OpenAIResponse

    @property
    def num_bytes(self) -> int: ...

    def queue(self, generation: Generation) -> bytes: ...

    def take(self, generation: Generation) -> bytes: ...

    def failed(self, error: RequestError) -> bytes: ...

    def keep(self) -> bool: ...


Reopen = Callable[[StoredResponse, StoredRequest], Awaitable[tuple[Generation, Writer]]]


class BackgroundResponses:
    def __init__(self, context: ActorContext, store: ResponseStore) -> None:
        self.owner = f"{context.name}:{context.epoch}"
        self.reopen: Reopen | None = None  # submits a stored response again
        self._context = context
        self._store = store
        self._open: dict[str, str] = {}  # ids of responses in progress -> sources
        self._unsaved: list[Writer] = []  # ended, but there was no room to store them
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._touched_ns = 0
        self._epochs: list[int] = []  # of all api processes, at the last check for orphaned responses
        self._is_stopping = False

    def check_room(self, source: str) -> None:
        """Raise 429 if too many are in progress."""
        num_own = Counter(self._open.values())[source]
        if not has_room(num_own, len(self._open), MAX_OPEN):
            raise RequestError(
                (
                    f"too many background responses: {len(self._open)} in progress, {num_own} of them yours, limit "
                    f"{MAX_OPEN}; wait for one, or cancel one"
                ),
                status=429,
                code="too_many_background_responses",
                retry_after_s=5,
            )

    def begin(self, generation: Generation, writer: Writer, asked: StoredRequest) -> None:
        """Take over a request. Raises RequestError if it cannot be stored."""
        response = writer.response
        if writer.num_bytes > MAX_RESPONSE_BYTES // 2:
            generation.close()
            limit = MAX_RESPONSE_BYTES // 2
            text = (
                f"{writer.num_bytes} bytes with tools and instructions, but the limit for background responses is "
                f"{limit}; send less"
            )
            raise invalid("input", text)
        events = writer.queue(generation)
        is_kept = response.store and self._store.save_request(response.id, asked)
        if not is_kept or (asked.is_streaming and not self._store.append_events(response.id, events)):
            generation.close()
            self._store.delete(response.id)
            text = "no room to store a background response; try again later, or send it without background"
            raise RequestError(text, status=503, code="no_room", retry_after_s=30)
        self._begin(response.id, asked.source, self._make(generation, writer, asked.is_streaming))

    def is_lost(self, response_id: str, stored: StoredResponse) -> bool:
        """Return whether its process has died, and no other can generate it."""
        return self._is_orphan(stored) and not self._store.has_request(response_id)

    def stop(self) -> None:
        """Stop: the process ends, and another one generates its responses."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._stir()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    async def change(self) -> None:
        """Wait until something may have changed: in this process at once, in another within 100 ms."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def on_tick(self, now_ns: int) -> None:
        """Check for changes. Called several times a second."""
        self._stir()
        epochs = [self._context.counters.actor(f"api{index}").epoch for index in range(self._context.config.api_processes)]
        if epochs != self._epochs and not self._is_stopping and self._claim_orphans():
            self._epochs = epochs
        if now_ns - self._touched_ns > TOUCH_INTERVAL_NS:
            self._touched_ns = now_ns
            self._store.touch(self._open)
            self._unsaved = [writer for writer in self._unsaved if not self._save(writer)]

    def _begin(self, response_id: str, source: str, work: Coroutine[None, None, None]) -> None:
        self._open[response_id] = source
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_orphan(self, stored: StoredResponse) -> bool:
        name, _, epoch = stored.owner.partition(":")
        return bool(epoch) and stored.owner != self.owner and self._context.counters.actor(name).epoch != int(epoch)

    def _claim_orphans(self) -> bool:
        """Claim orphaned responses; return whether all of them have a process again."""
        with self._store.claiming() as may_claim:
            for response_id in self._store.requested_ids() if may_claim else ():
                data, asked = self._store.load(response_id), self._store.load_request(response_id)
                stored = None if data is None else msgspec.json.decode(data, type=StoredResponse)
                if stored is None or asked is None or not is_open(stored):
                    if response_id not in self._open:
                        self._store.delete_request(response_id)
                elif self._is_orphan(stored):
                    stored.owner = self.owner
                    if self._store.save(response_id, msgspec.json.encode(stored)):
                        self._begin(response_id, asked.source, self._make_again(response_id, stored, asked))
        return may_claim

    async def _make_again(self, response_id: str, stored: StoredResponse, asked: StoredRequest) -> None:
        """Generate a response again; retried while the engine has no room for it."""
        assert self.reopen is not None
        waits = growing_waits()
        while True:
            stored.key = uuid.uuid4().hex
            self._store.save(response_id, msgspec.json.encode(stored))
            try:
                generation, writer = await self.reopen(stored, asked)
                break
            except RequestError as error:
                if error.status not in _BUSY:
                    self._context.log.warning("failed to restart response %s: %s", response_id, error)
                    self._store.save(response_id, msgspec.json.encode(_failed(stored, str(error))))
                    self._ended(response_id)
                    return
            except OSError as error:
                self._context.log.warning("failed to restart response %s: %s", response_id, error)
            await asyncio.sleep(next(waits))
        events = writer.queue(generation)
        is_streaming = asked.is_streaming and (not events or self._store.append_events(response_id, events))
        await self._make(generation, writer, is_streaming)

    async def _make(self, generation: Generation, writer: Writer, is_streaming: bool) -> None:
        try:
            is_last = False
            while not is_last:
                try:
                    await generation.wait()
                    is_last = generation.is_finished
                    events = writer.take(generation)
                except RequestError as error:
                    if self._is_stopping:
                        return
                    is_last, events = True, writer.failed(error)
                if is_last and not self._save(writer):
                    self._unsaved.append(writer)
                is_streaming = is_streaming and (not events or self._store.append_events(writer.response.id, events))
                self._stir()
        finally:
            generation.close()
            generation.answered()

    def _save(self, writer: Writer) -> bool:
        """Store a response; return whether it has ended and is done."""
        if not writer.keep():
            return False
        self._ended(writer.response.id)
        return True

    def _ended(self, response_id: str) -> None:
        self._store.delete_request(response_id)
        self._open.pop(response_id, None)
        self._stir()

    def _stir(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class _Status(msgspec.Struct):
    status: str


def is_open(stored: StoredResponse) -> bool:
    """Return whether it is still in progress, according to its file."""
    return msgspec.json.decode(stored.response, type=_Status).status in ("queued", "in_progress")


def with_status(stored: StoredResponse, is_lost: bool) -> bytes:
    """Return the response for clients. `is_lost`: one that has not ended never will."""
    if is_lost and is_open(stored):
        stored = _failed(stored, "the HTTP process of this response stopped; send the request again")
    return bytes(stored.response)


def _failed(stored: StoredResponse, message: str) -> StoredResponse:
    fields = msgspec.json.decode(stored.response)
    fields |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return msgspec.structs.replace(stored, response=msgspec.Raw(msgspec.json.encode(fields)))
