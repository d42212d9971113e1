"""Timeouts of a connection, on a server with shorter ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from api.client.generation import ClientGone
from api.connection import Connection
from api.request_context import next_part
from engine.errors import RequestError
from tests.waiting import WATCHDOG_S, wait_until

LONG = 32 << 20  # more than the kernel keeps for a client that does not read


class Impatient(Connection):
    head_timeout_s = 0.2


class ImpatientAfterwards(Connection):
    """Connection with a short timeout for the second head and for a client that does not read its answer."""

    head_timeout_s = WATCHDOG_S
    stall_timeout_s = 0.2
    num_lost = 0

    def connection_lost(self, exc: Exception | None) -> None:
        ImpatientAfterwards.num_lost += 1
        super().connection_lost(exc)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    ImpatientAfterwards.head_timeout_s = 0.2
    if scope["path"] == "/long":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LONG)]})
        await send({"type": "http.response.body", "body": bytes(LONG)})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def port_of(connection: type[Connection]) -> Iterator[int]:
    ImpatientAfterwards.num_lost = 0
    ImpatientAfterwards.head_timeout_s = WATCHDOG_S
    config = uvicorn.Config(application, http=connection, ws="none", loop="uvloop", lifespan="off", log_config=None, port=0)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        wait_until(lambda: server.started, what="server started")
        yield int(listener.getsockname()[1])
        server.should_exit = True
        thread.join()


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that come until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            received += part
    return received


@pytest.mark.slow
@pytest.mark.parametrize("beginning", [b"", b"GET", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: 1"])
def test_a_head_must_arrive_in_time(beginning: bytes) -> None:
    with (
        port_of(Impatient) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
    ):
        connection.sendall(beginning)
        assert connection.recv(100) == b""


@pytest.mark.parametrize("rest", [b"GET / HT", b"G", b"\r", b"\r\n", b"\r\n\r\n"])
@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n",  # answered before its body is here
    ],
)
def test_next_head_after_an_answer_has_a_timeout(first: bytes, rest: bytes) -> None:
    """The timeout for the next head starts after any answer."""
    with (
        port_of(ImpatientAfterwards) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
    ):
        connection.sendall(first)
        answer = connection.recv(1000)
        while not answer.endswith(b"ok"):
            answer += connection.recv(1000)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(rest)
            assert connection.recv(100) == b""


def test_part_of_next_head_arrives_with_the_first() -> None:
    with (
        port_of(ImpatientAfterwards) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET")
        assert read_all(connection).endswith(b"ok")


@pytest.mark.slow
@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_an_answer_that_is_never_read(close: bytes) -> None:
    with (
        port_of(ImpatientAfterwards) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
    ):
        connection.sendall(b"GET /long HTTP/1.1\r\nhost: x\r\n%b\r\n" % close)
        wait_until(lambda: ImpatientAfterwards.num_lost, what="the connection given up")


def test_slow_client_gets_the_whole_answer() -> None:
    """A slow client gets the whole answer, even over many times the stall timeout. Retried if this reader itself stalled."""

    def is_whole(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection:
            connection.sendall(b"GET /long HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return len(read_all(connection)) > LONG

    with port_of(ImpatientAfterwards) as port:
        ImpatientAfterwards.head_timeout_s = WATCHDOG_S
        wait_until(lambda: is_whole(port), what="all of it")


def test_a_body_must_arrive_in_time() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RequestError) as raised:
        asyncio.run(next_part(never, 0.01))
    assert raised.value.status == 408


def test_parts_of_a_body() -> None:
    async def part() -> Message:
        return {"type": "http.request", "body": b"ab", "more_body": True}

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    assert asyncio.run(next_part(part, 1)) == (b"ab", False)
    with pytest.raises(ClientGone):
        asyncio.run(next_part(gone, 1))
