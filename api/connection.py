"""uvicorn's HTTP/1.1 connection, with limits for slow clients, for too many connections and for unbounded requests.

One instance per connection of the api process. The limits:

    open connections        `admission.py`: in total and per address; beyond that only /health is answered
    a request's head        `head_timeout_s` from its first byte, 64 KiB, 100 fields; else 431
    between two requests    uvicorn's keep-alive time
    requests sent ahead     few and short; else the connection ends after the current answer
    an answer not read      `stall_timeout_s` without acknowledged bytes; then it is closed

Bytes that are not HTTP get the usual kind of error, and a handler can close its connection (`request_context.ABORT_KEY`). The
limits of bodies are in `RequestContext`. An offer to switch the protocol (`Upgrade`) is ignored (RFC 9110, 7.8): the request is
served without it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING, Any

import httptools

from api.admission import Admission
from api.errors import error_body
from api.known_uvicorn import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from api.request_context import ABORT_KEY
from engine.errors import RequestError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 << 10
MAX_HEAD_FIELDS = 100
MAX_REQUESTS_AHEAD = 16
# less than uvicorn's high-water mark, where it stops reading and would not notice that a client disconnects
MAX_AHEAD_BYTES = 48 << 10
PIECE_BYTES = 16 << 10  # given to the parser at a time: how far it can run beyond a limit
LINGER_S = 2.0  # a refused client may still send; after an immediate close it would lose our answer
_TCP_INFO_BYTES_ACKED = slice(120, 128)  # in Linux's struct tcp_info


class Connection(HttpToolsProtocol):
    admission = Admission(1024)  # set by the server before it listens
    head_timeout_s = 30.0
    surplus_head_timeout_s = 5.0  # for a connection that is not admitted
    stall_timeout_s = 60.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None  # the latest one that was passed to the application
        self._is_between = True  # between two requests: no byte of the next one has arrived
        self._is_in_head = False
        self._is_deaf = False  # further bytes are dropped
        self._num_fields = self._num_head_bytes = 0  # of the current head, later of a trailer
        self._num_idle_bytes = 0  # since a head, a part of a body or a request was complete
        self._refusal: RequestError | None = None

    # ------------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.admission.enter(self, self.client[0] if self.client else "")
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.admission.leave(self)
        self._head_arrived()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        for cycle in [self._answering, *(cycle for cycle, _ in self.pipeline)]:  # uvicorn informs only the last one
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self._is_deaf or self.transport.is_closing():
                return
            piece = data[start : start + PIECE_BYTES]
            self._num_idle_bytes += len(piece)
            self._parse(piece)
            if self._num_idle_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large_head())
            elif self._is_too_far_ahead():
                self._end_with_answer()
        if not self._is_answer_under_way:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    # --------------------------------------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between, self._is_in_head = False, True
        self._num_fields = self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._count_head(len(name) + len(value))
        if self._is_in_head:  # a trailer's fields change nothing
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_upgrade_offered:
            return  # the head is parsed again
        self._head_arrived()
        self._is_in_head = False
        self._num_fields = self._num_head_bytes = self._num_idle_bytes = 0
        try:
            self.admission.check(self, self.url)
            _check_transfer_codings(b",".join(value for name, value in self.headers if name == b"transfer-encoding"))
        except RequestError as error:
            self._refusal = error
            raise  # the parser stops, and uvicorn calls `send_400_response`
        self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.admission.is_surplus(self):
            self.cycle.keep_alive = False
        if self.pipeline:  # uvicorn stops reading, and would not notice that the client of the current answer disconnects
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_offered:
            return
        self._is_between, self._num_idle_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or RequestError(msg, code="invalid_http"))

    def cut(self) -> None:
        """Close it at once: another connection needs its place."""
        self.admission.leave(self)
        self.transport.abort()

    # ------------------------------------------------------------------------------------------------ called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_soon(self._watch_reader)  # after the attempt to write
        # the rest of a request that was answered early, or the next head
        if not self._is_between and not self._is_answer_under_way:
            self._expect_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, _ending_with_connection(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    # --------------------------------------------------------------------------------------------------------- inside

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It stops after a head that offers an upgrade, and would leave the body to the other protocol; a new
        parser gets that head without the offer, and then the rest."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_upgrade_offered:
                    return  # CONNECT: the bytes after its head are dropped
                head = self._head_without_offer()
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                data = head + data
            except httptools.HttpParserError as error:
                self.send_400_response(f"invalid HTTP request: {error}")
                return

    @property
    def _is_upgrade_offered(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))

    @property
    def _is_answer_under_way(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            timeout_s = self.surplus_head_timeout_s if self.admission.is_surplus(self) else self.head_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_fields > MAX_HEAD_FIELDS:
            self._refusal = _too_large_head()
            raise self._refusal  # the parser stops, and uvicorn calls `send_400_response`

    def _is_too_far_ahead(self) -> bool:
        num_bytes = 0
        for cycle, _ in self.pipeline:
            num_bytes += len(cycle.body) + sum(len(name) + len(value) for name, value in cycle.scope["headers"])
        return len(self.pipeline) > MAX_REQUESTS_AHEAD or num_bytes > MAX_AHEAD_BYTES

    def _end_with_answer(self) -> None:
        """Make the current answer the last one: later requests are not served. Their bytes are still read, to notice that a
        client disconnects."""
        assert self._answering is not None
        self._is_deaf = True
        self._answering.keep_alive = False
        self.pipeline.clear()

    def _refuse(self, error: RequestError) -> None:
        """Answer bytes that are not a request, if the client can still understand the answer, and close."""
        if self._is_deaf:
            return
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            if cycle is not self.cycle or not cycle.more_body:
                self._end_with_answer()
                return
            cycle.disconnected = True  # its own body was malformed
            cycle.message_event.set()
        if cycle is not None and cycle is self.cycle and cycle.more_body and cycle.response_started:
            self.transport.close()
            return
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        head += b"retry-after: %d\r\n\r\n" % error.retry_after_s if error.retry_after_s else b"\r\n"
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self._is_deaf = True
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._head_arrived()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _watch_reader(self) -> None:
        """Check again later whether the client reads, while data waits for it."""
        if self._stall_timer is None and not self._is_lost and self.transport.get_write_buffer_size():
            self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._check_reader, self._num_acknowledged())

    def _check_reader(self, num_acknowledged: int) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() and self._num_acknowledged() == num_acknowledged:
            self.transport.abort()
        else:
            self._watch_reader()

    @property
    def _is_lost(self) -> bool:
        return self.parser is None

    def _num_acknowledged(self) -> int:
        """Return the bytes that the client's machine has acknowledged so far. For a UNIX socket, where the writer waits when it
        is full: minus the bytes that the client has not read."""
        connection = self.transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            return -self.transport.get_write_buffer_size()
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES_ACKED.stop)
        return int.from_bytes(info[_TCP_INFO_BYTES_ACKED], sys.byteorder)


def _ending_with_connection(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return the application for HTTP/1.0, which has no chunks: an answer without a length ends with the connection."""
    is_framed = True

    async def send(message: Any) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            is_framed = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not is_framed:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif not is_framed:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)

    async def run(scope: Any, receive: Any, _: Any) -> None:
        await app(scope, receive, send)

    return run


def _check_transfer_codings(value: bytes) -> None:
    """Raise RequestError for a coding that the server does not decode: 400 if it hides where the body ends, else 501 (RFC 9112,
    6.1 and 6.3). The parser rejects another coding after chunked."""
    codings = [coding for each in value.lower().split(b",") if (coding := each.strip(b" \t"))]
    if not codings or codings == [b"chunked"]:
        return
    shown = value[:100].decode("latin-1")
    if codings[-1] != b"chunked":
        raise RequestError(
            f"the transfer-encoding {shown!r} does not end with chunked; send transfer-encoding: chunked, or a content-length",
            code="invalid_http",
        )
    raise RequestError(
        f"the transfer-encoding {shown!r} is not supported, only chunked is; send the body without other transfer codings",
        status=501,
        code="unsupported_transfer_encoding",
    )


def _too_large_head() -> RequestError:
    return RequestError(
        (
            f"the request head exceeds the limit of {MAX_HEAD_BYTES} bytes or {MAX_HEAD_FIELDS} fields; send "
            "fewer or shorter headers"
        ),
        status=431,
        code="head_too_large",
    )
