"""uvicorn's HTTP/1.1 connection with the limits that keep slow and surplus clients from holding the server.

One instance per connection of the api process. A connection must complete a request's head in time, no more than
`max_connections` are open, what is not HTTP gets an error in the same shape as any other, and a handler can cut its connection
(`exchange.ABORT_KEY`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.errors import error_body
from api.exchange import ABORT_KEY
from engine.errors import RequestError


class Connection(HttpToolsProtocol):
    max_connections = 1024  # set by the server before it listens
    head_timeout_s = 30.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[literal-required]
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        body = error_body(RequestError(msg, code="invalid_http"))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[400] + head + body)
        self.transport.close()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
