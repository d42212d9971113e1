"""Server-sent events: one stream for one generation, in the format of any protocol.

Runs in the api process. A write has everything since the last one, so a client that reads slowly gets fewer, larger writes. The
headers are sent with the first token, or after a silence (`--sse-keep-alive-interval`) after which a proxy might soon give up:
until then an error is a plain response with its status, afterwards it is an event. Silences are filled with comments that
clients ignore.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.client.generation import ClientGone, Generation
from api.request_context import SCOPE_KEY, leave_with_client
from engine.errors import RequestError

KEEP_ALIVE = b": keep-alive\n\n"


class EventWriter(ABC):
    """Writes the events of one stream."""

    keep_alive = KEEP_ALIVE  # fills silences

    @abstractmethod
    def take(self, generation: Generation) -> bytes:
        """Return the events for everything since the last call."""

    def named(self, error: RequestError) -> RequestError:
        """Return an error that occurs before the stream, with the client's names of parameters."""
        return error

    @abstractmethod
    def failed(self, error: RequestError) -> bytes:
        """Return the last events of a stream that an error ends."""


class EventStream(Response):
    """The response to a request with `stream: true`."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: EventWriter, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._has_begun = False
        self._silence = Silence(generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(leave_with_client(self._generation, receive))
        self._silence.begin(scope[SCOPE_KEY].services.context.config.sse_keep_alive_interval_s)
        try:
            await self._pump(send)
        finally:
            self._silence.end()
            watch.cancel()
            self._generation.close()

    async def _pump(self, send: Send) -> None:
        try:
            is_last = False
            while not is_last:
                await self._generation.wait()
                if not self._has_begun:
                    await self._begin(send)
                is_last = self._generation.is_finished
                filling = self._writer.keep_alive if self._silence.is_due else b""
                events = self._writer.take(self._generation) or filling
                if events or is_last:
                    await self._write(send, events, is_last)
        except RequestError as error:
            if not self._has_begun:
                raise self._writer.named(error) from None
            await self._write(send, self._writer.failed(error), True)
        except ClientGone:
            return

    async def _begin(self, send: Send) -> None:
        """Send the head, without headers that are not known yet."""
        self._has_begun = True
        self.headers.update({name: value for name, value in self._generation.headers.items() if value})
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _write(self, send: Send, body: bytes, is_last: bool) -> None:
        self._silence.since_ns = self._generation.writing_since_ns = time.monotonic_ns()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._generation.wrote()
        self._silence.is_due = False


class Silence:
    """Wakes the writer of a stream whenever nothing was written for some time. It has one timer, which writing does not change:
    the writer only sets `since_ns`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._timer: asyncio.TimerHandle | None = None
        self.since_ns = 0  # CLOCK_MONOTONIC: when the last write began
        self.is_due = False  # something must be written

    def begin(self, interval_s: float) -> None:
        """Begin. 0: silence is not limited."""
        self.since_ns = time.monotonic_ns()
        if interval_s:
            self._interval_s, self._loop = interval_s, asyncio.get_running_loop()
            self._timer = self._loop.call_later(interval_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._interval_s - (time.monotonic_ns() - self.since_ns) / 1e9
        if left_s <= 0:
            self.is_due = True
            self._generation.stir()
        self._timer = self._loop.call_later(left_s if left_s > 0 else self._interval_s, self._look)
