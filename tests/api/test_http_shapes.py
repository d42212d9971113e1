"""Shapes of HTTP that clients, proxies and attackers send: old versions, chunks, lengths that contradict each other."""

from __future__ import annotations

import orjson
import pytest

from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text

BODY = b'{"prompt":"x","max_tokens":3}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
NEXT = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def chunks(body: bytes, size: int = 5) -> bytes:
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


CONTRADICTIONS = {
    "both lengths": POST + b"content-length: 4\r\n" + CHUNKED + b"\r\n" + chunks(BODY),
    "the other order": POST + CHUNKED + b"content-length: 400\r\n\r\n" + chunks(BODY),
    "two lengths": POST + LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "a list of lengths": POST + b"content-length: 29, 29\r\n\r\n" + BODY,
    "a signed length": POST + b"content-length: +29\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "another coding": POST + b"transfer-encoding: xchunked\r\n\r\n" + chunks(BODY),
    "chunked is not last": POST + b"transfer-encoding: chunked, identity\r\n\r\n" + chunks(BODY),
    "two codings": POST + CHUNKED + b"transfer-encoding: identity\r\n\r\n" + chunks(BODY),
    "chunked twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n" + chunks(BODY),
    "gzip alone": POST + b"transfer-encoding: gzip\r\n\r\n" + chunks(BODY),
    "a space before the colon": POST + b"transfer-encoding : chunked\r\n\r\n" + chunks(BODY),
    "a folded header": POST + b"x: a\r\n content-length: 3\r\n" + LENGTH + b"\r\n" + BODY,
    "line feeds alone": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "a chunk of no number": POST + CHUNKED + b"\r\nzz\r\n" + BODY,
    "a negative chunk": POST + CHUNKED + b"\r\n-5\r\n" + BODY,
    "a chunk beyond 64 bits": POST + CHUNKED + b"\r\nffffffffffffffffff\r\n" + BODY,
    "a chunk in C's notation": POST + CHUNKED + b"\r\n0x1d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk without its end": POST + CHUNKED + b"\r\n1d\r\n" + BODY + b"XX0\r\n\r\n",
    "a null byte": b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


def answer_to(server: ApiServer, request: bytes) -> bytes:
    with server.connection(request) as connection:
        received = bytearray()
        while part := connection.recv(65536):
            received += part
    return bytes(received)


@pytest.mark.parametrize("shape", CONTRADICTIONS)
def test_contradictory_lengths_end_the_connection(server: ApiServer, shape: str) -> None:
    """The connection ends, and bytes that follow are not taken as a request."""
    answer = answer_to(server, CONTRADICTIONS[shape] + NEXT)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "codings",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"TRANSFER-ENCODING: Deflate;level=9 ,\tCHUNKED\r\n",
        b"transfer-encoding: identity, chunked\r\nconnection: upgrade\r\nupgrade: h2c\r\n",
    ],
    ids=["list", "fields", "case", "upgrade"],
)
def test_unknown_transfer_coding_is_not_implemented(server: ApiServer, codings: bytes) -> None:
    """The connection ends, and bytes that follow are not taken as a request."""
    answer = answer_to(server, POST + codings + b"\r\n" + chunks(BODY) + NEXT)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 ")
    assert b"connection: close" in head
    error = orjson.loads(body)["error"]
    assert error["code"] == "unsupported_transfer_encoding"
    assert "is not supported, only chunked is" in error["message"]


def test_unknown_coding_spoils_no_earlier_answer(server: ApiServer) -> None:
    good = POST + LENGTH + b"\r\n" + BODY
    answer = answer_to(server, good + POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunks(BODY) + NEXT)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert said_text(3).encode() in answer
    assert b"HTTP/1.1 200 " not in answer[1:]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("another coding", b"'xchunked' does not end with chunked"),
        ("gzip alone", b"'gzip' does not end with chunked"),
        ("chunked is not last", b"Invalid `Transfer-Encoding`"),
        ("chunked twice", b"Invalid `Transfer-Encoding`"),
        ("two lengths", b"Duplicate Content-Length"),
    ],
)
def test_invalid_framing_is_named(server: ApiServer, shape: str, reason: bytes) -> None:
    assert reason in answer_to(server, CONTRADICTIONS[shape])


@pytest.mark.parametrize(
    "framed",
    [
        CHUNKED + b"\r\n" + chunks(BODY),
        CHUNKED + b"\r\n" + chunks(BODY, 1),
        b"Transfer-Encoding: ,\tChunked \r\n\r\n" + chunks(BODY),
        CHUNKED + b"\r\n" + chunks(BODY)[:-2] + b"x: y\r\n\r\n",
        CHUNKED + b"\r\n1d;name=value\r\n" + BODY + b"\r\n0\r\n\r\n",
        LENGTH + b"\r\n" + BODY,
    ],
    ids=["chunks", "bytes", "other case", "trailer", "extension", "length"],
)
def test_framing_determines_the_end_of_a_body(server: ApiServer, framed: bytes) -> None:
    """The next request on the connection is answered as well."""
    answer = answer_to(server, POST + framed + NEXT)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert said_text(3).encode() in answer


def test_http_1_0_body_ends_with_the_connection(server: ApiServer) -> None:
    whole = answer_to(server, b"POST /v1/completions HTTP/1.0\r\n" + LENGTH + b"\r\n" + BODY)
    assert b" 200 OK\r\n" in whole
    assert said_text(3).encode() in whole
    body = BODY[:-1] + b',"stream":true}'
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
    head, _, events = answer_to(server, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_expecting_client_is_told_to_continue(server: ApiServer) -> None:
    with server.connection(POST + b"expect: 100-continue\r\nconnection: close\r\n" + LENGTH + b"\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
