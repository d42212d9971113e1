"""A small HTTP/1.1 client for load generation: keep-alive connections, and replies passed on as they arrive.

Runs in the `tokamak bench serve` process. The client shares the CPU with the measured server, so the cost per received packet
matters: llhttp (httptools) parses inside the protocol's `data_received`, and the task that sent the request wakes once, when
the reply is complete.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

import httptools

from tools.target import Target

OnBody = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. The callbacks in the middle are llhttp's."""

    def __init__(self) -> None:
        self.is_reusable = True
        self.has_reply = False  # a byte of the current reply has arrived
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[int] | None = None
        self._is_framed = False

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and return the reply's status once its body is complete. Raises ConnectionError."""
        if self._transport is None:
            raise ConnectionError("the server closed the connection")
        self._reply = asyncio.get_running_loop().create_future()
        self.on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self.has_reply = self._is_framed = False
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_message_complete(self) -> None:
        self.is_reusable &= self._parser.should_keep_alive()
        self._finish()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_reply = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the reply is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._transport = None
        if self.has_reply and not self._is_framed:
            self._finish()  # a body without a length ends with its connection
        else:
            self._fail(error or ConnectionError("the server closed the connection"))

    def _finish(self) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)


class Client:
    """Client of one server, with as many connections as requests in flight."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        head = "".join(f"{name}: {value}\r\n" for name, value in target.headers().items())
        self._head = f"host: {target.host}:{target.port}\r\n{head}"

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        body = bytearray()
        return await self.send("GET", path, b"", body.extend), bytes(body)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body."""
        reply = bytearray()
        return await self.send("POST", path, body, reply.extend), bytes(reply)

    async def send(self, method: str, path: str, body: bytes, on_body: OnBody, head: str = "") -> int:
        """Send a request and return the status when the body is complete. `head`: additional header lines with line ends.
        Raises OSError (ConnectionError, TimeoutError)."""
        framing = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method == "POST" else ""
        request = f"{method} {self._target.path(path)} HTTP/1.1\r\n{self._head}{framing}{head}\r\n".encode() + body
        exchange = asyncio.ensure_future(self._send(request, on_body))
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation (Ctrl+C) that comes together with the reply.
            await asyncio.wait({exchange}, timeout=self._timeout_s)
            if not exchange.done():
                raise TimeoutError(f"no complete reply after {self._timeout_s:g} s")
            return exchange.result()
        finally:
            exchange.cancel()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, request: bytes, on_body: OnBody) -> int:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_reusable:
                continue
            try:
                return await self._exchange(connection, request, on_body)
            except ConnectionError:
                if connection.has_reply:
                    raise
                # The server closed the idle connection just before its reuse: the request never ran.
        return await self._exchange(await self._connect(), request, on_body)

    async def _connect(self) -> Connection:
        context = ssl.create_default_context() if self._target.is_tls else None
        loop = asyncio.get_running_loop()
        if self._target.uds:
            return (await loop.create_unix_connection(Connection, self._target.uds))[1]
        _, connection = await loop.create_connection(Connection, self._target.host, self._target.port, ssl=context)
        return connection

    async def _exchange(self, connection: Connection, request: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.exchange(request, on_body)
        except BaseException:  # cancelled included: a reply may still come over this connection
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        return status
