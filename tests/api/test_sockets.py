"""Endless heads, pipelined requests, and clients that leave: over raw sockets, to a running api process."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import orjson
import pytest

from tests.api.api_server import ApiServer
from tests.waiting import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG = b"a" * 100_000  # a parser may run some way beyond the limit


def completion(name: str, **fields: object) -> bytes:
    body = orjson.dumps({"prompt": "x", "max_tokens": 20, **fields})
    return HEAD + b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (name.encode(), len(body)) + body


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that come until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            received += part
    return received


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + LONG + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD + b"x: " + LONG + b"\r\n\r\n",
        HEAD + LONG + b": x\r\n\r\n",
        HEAD + b"a: b\r\n" * 100 + b"\r\n",
        HEAD + (b"a: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n",
        b"\r\n" * 50_000,
        CHUNKED + b"1;" + LONG + b"\r\n",
        CHUNKED + b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 101 + b"\r\n",
        CHUNKED + b"1\r\na\r\n0\r\na: " + LONG,
    ],
    ids=["path", "value", "name", "fields", "sum", "blank lines", "chunk extension", "trailers", "trailer"],
)
def test_heads_without_end(server: ApiServer, sent: bytes) -> None:
    with server.connection(sent) as client:
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_long_head_takes_no_memory(server: ApiServer) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{server.child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    with server.connection(HEAD) as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for index in range(16_000):
                client.sendall(b"x-%d: " % index + b"b" * 1000 + b"\r\n")
        read_all(client)
    assert resident() - before < 16 << 20


def test_heads_within_the_limits(server: ApiServer) -> None:
    head = b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x-%d: %b\r\n" % (i, b"a" * 600) for i in range(98))
    with server.connection(head + b"connection: close\r\n\r\n") as client:
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("ahead", [VERSION, b"GET /ver", b"\r\n"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_sent_more_and_leaves(server: ApiServer, is_stream: bool, ahead: bytes) -> None:
    name = f"leaves-{is_stream}-{len(ahead)}"
    with server.paced(3), server.connection(completion(name, stream=is_stream) + ahead) as client:
        wait_until(lambda: [s for s in list(server.peer.streams.values()) if s.num_sent == 3], what="three tokens")
        client.close()
        wait_until(lambda: server.peer.aborts(name), what="aborted")


def test_pipelined_requests_are_answered_in_order(server: ApiServer) -> None:
    last = VERSION.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with server.connection(completion("first") + VERSION * 9 + completion("second") + last) as client:
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200 ") == 12
    assert answers.index(b"x-request-id: first") < answers.index(b'"version"') < answers.index(b"x-request-id: second")


OFFERS = {
    "foo": b"connection: keep-alive, Upgrade\r\nupgrade: foo/2\r\n",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
}


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("is_apart", [False, True], ids=["one packet", "body apart"])
def test_an_offer_to_upgrade_is_ignored(server: ApiServer, offer: bytes, is_apart: bool) -> None:
    """Bytes after the head are the body, followed by the next requests."""
    names = [f"upgrade-{len(offer)}-{is_apart}-{index}" for index in range(3)]
    sent = [completion(name).replace(b"\r\n", b"\r\n" + offer, 1) for name in names]
    chunked = b"%bx-request-id: chunked\r\ntransfer-encoding: chunked\r\n\r\n" % (HEAD + offer)
    chunked += b'10\r\n{"prompt": "x", \r\n10\r\n"max_tokens": 2}\r\n0\r\n\r\n'
    last = VERSION.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    rest = b"".join(sent[1:]) + chunked + VERSION.replace(b"\r\n", b"\r\n" + offer, 1) + last
    with server.connection() as client:
        if is_apart:
            head, _, body = sent[0].partition(b"\r\n\r\n")
            client.sendall(head[:100])
            client.sendall(head[100:] + b"\r\n\r\n")
            client.sendall(body[:5])
            client.sendall(body[5:] + rest)
        else:
            client.sendall(sent[0] + rest)
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1 ") == 6
    places = [answers.index(b"x-request-id: %b" % name.encode()) for name in (*names, "chunked")]
    assert places == sorted(places)
    assert answers.count(b'"finish_reason":"length"') == 4


@pytest.mark.parametrize("ahead", [VERSION * 500, completion("big", user="x" * 500_000), b"\x00nonsense", HEAD + b"x: " + LONG])
def test_too_much_pipelined_input_ends_the_connection(server: ApiServer, ahead: bytes) -> None:
    """The answer under way is complete and the last; the client may send the rest again."""
    name = f"whole-{len(ahead)}"
    with server.paced(3), server.connection(completion(name) + ahead) as client:
        wait_until(lambda: [s for s in list(server.peer.streams.values()) if s.num_sent == 3], what="three tokens")
        server.peer.credits = None
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b'"finish_reason":"length"' in answers
    assert not server.peer.submits("big")
