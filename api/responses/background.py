"""Responses with `background: true`: made while no client waits. Owned by one api process, which is the one that was asked.

A response is a file from its first moment on (`store.py`), so that each api process can show it, and so are the events of one
with `stream: true`, from which a stream goes on where a client lost it. Its request is an open one like any other: it outlives
the death of all actors behind the edge. Where its own api process dies, it has failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from api.client.generation import Generation
from api.responses.store import MAX_RESPONSE_BYTES, ResponseStore, StoredResponse
from api.schemas.requests import invalid
from engine.errors import RequestError
from engine.process.context import ActorContext
from engine.process.shares import has_room

if TYPE_CHECKING:
    from api.responses.answers import OpenAIResponse  # of routes that most engines are never asked for

MAX_OPEN = 64  # of a source alone; twice as many of all
TOUCH_INTERVAL_NS = 1_000_000_000


class Writer(Protocol):
    """What `response.ResponseWriter` is here."""

    response: OpenAIResponse

    @property
    def num_item_bytes(self) -> int: ...

    def queue(self, generation: Generation) -> bytes: ...

    def take(self, generation: Generation) -> bytes: ...

    def failed(self, error: RequestError) -> bytes: ...

    def keep(self) -> bool: ...


class BackgroundResponses:
    def __init__(self, context: ActorContext, store: ResponseStore) -> None:
        self.owner = f"{context.name}:{context.epoch}"
        self._context = context
        self._store = store
        self._open: dict[str, str] = {}  # ids of responses that are made -> sources
        self._unsaved: list[Writer] = []  # those that have ended, and found no room
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._touched_ns = 0

    def check_room(self, source: str) -> None:
        """429 where too many are under way."""
        num_own = Counter(self._open.values())[source]
        if not has_room(num_own, len(self._open), MAX_OPEN):
            raise RequestError(
                f"too many background responses: {len(self._open)} under way, {num_own} of them yours, limit {MAX_OPEN}; wait "
                "for some, or cancel them",
                status=429,
                code="too_many_background_responses",
                retry_after_s=5,
            )

    def begin(self, generation: Generation, writer: Writer, source: str, is_streaming: bool) -> None:
        """Take a request over. RequestError: it cannot be stored."""
        response = writer.response
        if writer.num_item_bytes > MAX_RESPONSE_BYTES // 2:
            generation.close()
            limit = MAX_RESPONSE_BYTES // 2
            raise invalid("input", f"{writer.num_item_bytes} bytes, the limit of background responses is {limit}; send less")
        events = writer.queue(generation)
        if not response.store or (is_streaming and not self._store.append_events(response.id, events)):
            generation.close()
            self._store.delete(response.id)
            text = "there is no room to store a background response; try again later, or send it without background"
            raise RequestError(text, status=503, code="no_room", retry_after_s=30)
        self._open[response.id] = source
        task = asyncio.create_task(self._make(generation, writer, is_streaming))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_lost(self, stored: StoredResponse) -> bool:
        """Whether the process that makes it has died."""
        name, _, epoch = stored.owner.partition(":")
        return bool(epoch) and stored.owner != self.owner and self._context.counters.actor(name).epoch != int(epoch)

    async def change(self) -> None:
        """Wait until something may have changed: in this process at once, in another within 100 ms."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def on_tick(self, now_ns: int) -> None:
        """Several times a second."""
        self._stir()
        if now_ns - self._touched_ns > TOUCH_INTERVAL_NS:
            self._touched_ns = now_ns
            self._store.touch(self._open)
            self._unsaved = [writer for writer in self._unsaved if not self._save(writer)]

    async def _make(self, generation: Generation, writer: Writer, is_streaming: bool) -> None:
        try:
            is_last = False
            while not is_last:
                try:
                    await generation.wait()
                    is_last = generation.is_finished
                    events = writer.take(generation)
                except RequestError as error:
                    is_last, events = True, writer.failed(error)
                if is_last and not self._save(writer):
                    self._unsaved.append(writer)
                is_streaming = is_streaming and (not events or self._store.append_events(writer.response.id, events))
                self._stir()
        finally:
            generation.close()

    def _save(self, writer: Writer) -> bool:
        """Whether a response that has ended needs no more care."""
        if not writer.keep():
            return False
        self._open.pop(writer.response.id, None)
        self._stir()
        return True

    def _stir(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def with_status(stored: StoredResponse, is_lost: bool) -> bytes:
    """The response as clients see it. `is_lost`: one that has not ended never will."""
    fields = msgspec.json.decode(stored.response) if is_lost else {}
    if fields.get("status") not in ("queued", "in_progress"):
        return bytes(stored.response)
    text = "the HTTP process that made this response has ended; send the request again"
    fields |= {"status": "failed", "error": {"code": "server_error", "message": text}}
    return msgspec.json.encode(fields)
