"""Limits of time on a connection, with a server of shorter ones."""

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
from api.exchange import next_part
from engine.errors import RequestError
from tests.waiting import WATCHDOG_S, wait_until


class Impatient(Connection):
    head_timeout_s = 0.2


class ImpatientAfterwards(Connection):
    """With the second head."""

    head_timeout_s = WATCHDOG_S


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    ImpatientAfterwards.head_timeout_s = 0.2
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def port_of(connection: type[Connection]) -> Iterator[int]:
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


@pytest.mark.parametrize("beginning", [b"", b"GET", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: 1"])
def test_a_head_must_arrive_in_time(beginning: bytes) -> None:
    with (
        port_of(Impatient) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
    ):
        connection.sendall(beginning)
        assert connection.recv(100) == b""


def test_the_second_head_too() -> None:
    with (
        port_of(ImpatientAfterwards) as port,
        socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = connection.recv(1000)
        while not answer.endswith(b"ok"):
            answer += connection.recv(1000)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"GET / HT")
            assert connection.recv(100) == b""


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
