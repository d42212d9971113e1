"""The stream of a background response, from any event on, as often as clients ask.

Runs in the api process, and reads what `background.py` writes in any of them. If the last events are missing (a full disk, a
process that died), the end is made from the stored response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.request_context import Services
from api.responses.background import BackgroundResponses, is_open, with_status
from api.responses.response import END_NAMES
from api.responses.store import ResponseStore, StoredResponse
from api.sse import KEEP_ALIVE


class StoredEvents(Response):
    """The response to a request for such a stream."""

    media_type = "text/event-stream"

    def __init__(self, services: Services, response_id: str, first: int = 0, headers: Mapping[str, str] | None = None) -> None:
        """`first`: number of the first event to send."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._services = services
        self._response_id = response_id
        self._first = first
        self._num_read = 0  # events
        self._place = 0  # their bytes
        self._has_end = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()

    async def _send_all(self, send: Send) -> None:
        interval_ns = int(self._services.context.config.sse_keep_alive_interval_s * 1e9)
        written_ns = time.monotonic_ns()
        while True:
            end = self._end()  # before events are read: if an end is stored, its events are stored by then, if at all
            while events := self._next():
                await self._write(send, b"".join(events))
                written_ns = time.monotonic_ns()
            if self._has_end or end is not None:
                break
            if self._services.feature(BackgroundResponses).is_stopping:  # the client reconnects, to another process
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            if interval_ns and time.monotonic_ns() - written_ns > interval_ns:
                await self._write(send, KEEP_ALIVE)
                written_ns = time.monotonic_ns()
            await self._services.feature(BackgroundResponses).change()
        if not self._has_end:
            await self._services.feature(BackgroundResponses).change()  # the last events follow the response at once
            while events := self._next():
                await self._write(send, b"".join(events))
        missing = b"" if self._has_end or not end else self._encoded(end)
        await send({"type": "http.response.body", "body": missing, "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _next(self) -> list[bytes]:
        """Return new events from `first` on; earlier ones are returned as empty."""
        data = self._services.feature(ResponseStore).events(self._response_id, self._place) or b""
        self._place += len(data)
        events = [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
        begin, self._num_read = self._num_read, self._num_read + len(events)
        if events:
            name = events[-1].partition(b"\n")[0].removeprefix(b"event: ").decode()
            self._has_end = name in END_NAMES.values()
        return [event if begin + index >= self._first else b"" for index, event in enumerate(events)]

    def _end(self) -> dict[str, Any] | None:
        """Return the stored response if it will not change any more, empty if it is gone; None: it may change."""
        data = self._services.feature(ResponseStore).load(self._response_id)
        if data is None:
            return {}
        stored = msgspec.json.decode(data, type=StoredResponse)
        is_lost = self._services.feature(BackgroundResponses).is_lost(self._response_id, stored)
        if is_open(stored) and not is_lost:
            return None
        found: dict[str, Any] = orjson.loads(with_status(stored, is_lost))
        return found

    def _encoded(self, response: dict[str, Any]) -> bytes:
        """Return the last event of a response."""
        name = END_NAMES[response["status"]]
        event = {"type": name, "sequence_number": self._num_read, "response": response}
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(event))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
