"""Answers that no client reads: waiting output is bounded in every API and for each source."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from api.client import held
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import WATCHDOG_S, wait_until

NUM_TOKENS = 220_000
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TEXTS = {  # where a stream's text is
    "/v1/responses": lambda event: event["delta"],
    "/v1/messages": lambda event: event.get("delta", {}).get("text", ""),
    "/api/chat": lambda event: event["message"]["content"],
    "/api/generate": lambda event: event["response"],
    "/v1/chat/completions": lambda event: event["choices"][0]["delta"].get("content", ""),
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": NUM_TOKENS},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Server at a UNIX socket, where the kernel buffers little."""
    with (
        tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory,
        ApiServer(tmp_path_factory.mktemp("run"), uds=f"{directory}/api.sock", max_model_len=1 << 20) as running,
    ):
        yield running


@contextlib.contextmanager
def saying(server: ApiServer, num_tokens: int, at_once: int) -> Iterator[None]:
    """Give sequences `num_tokens` tokens within the block, in quick deltas."""
    before = server.peer.most, server.peer.at_once, server.peer.pause_ns
    server.peer.most, server.peer.at_once, server.peer.pause_ns = num_tokens, at_once, 100_000
    try:
        yield
    finally:
        server.peer.most, server.peer.at_once, server.peer.pause_ns = before


def request_of(path: str, body: dict[str, Any]) -> bytes:
    content = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while part := connection.recv(1 << 20):
        received += part
    return bytes(received)


def events_of(received: bytes) -> Iterator[dict[str, Any]]:
    """Return the JSON of lines or of an event stream, of named events only the deltas: others repeat the whole answer. Chunks
    begin where writes do, which is where events do."""
    name = b""
    for line in received.splitlines():
        if line.startswith(b"event: "):
            name = line
        line = line.removeprefix(b"data: ")
        if line.startswith(b"{") and (not name or name.endswith(b"_delta") or name.endswith(b"_text.delta")):
            yield orjson.loads(line)


@pytest.mark.parametrize("path", BODIES)
def test_unread_stream_of_any_api_is_paused(server: ApiServer, path: str) -> None:
    pauses = server.count("stream_pauses_total")
    with saying(server, NUM_TOKENS, 64), server.connection(request_of(path, BODIES[path] | {"stream": True})) as connection:
        wait_until(lambda: server.count("stream_pauses_total") > pauses, what="paused")
        wait_until(lambda: not server.peer.streams, what="nothing in the engine")
        received = read_all(connection)
    assert "".join(map(TEXTS[path], events_of(received))) == said_text(NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_unread_logprobs_of_one_source_are_bounded(server: ApiServer, path: str) -> None:
    """The bound holds for streams and whole answers; another source's request is answered meanwhile."""
    asked = {"/v1/responses": {"include": ["message.output_text.logprobs"]}}.get(path, {"logprobs": True})
    body = BODIES[path] | asked | {"top_logprobs": 20}
    num_tokens, num_requests = 8000, 7  # 168,000 log-probabilities each
    with saying(server, num_tokens, 8), contextlib.ExitStack() as stack:
        requests = [request_of(path, body | {"stream": number % 2 == 1}) for number in range(num_requests)]
        connections = [stack.enter_context(server.connection(request)) for request in requests]
        wait_until(lambda: server.count("held_logprobs") > held.MAX_OF_SOURCE / 2, what="much is held")
        most = 0.0

        def is_calm() -> bool:
            nonlocal most
            most = max(most, server.count("held_logprobs"))
            return not server.peer.streams

        wait_until(is_calm, what="all ended or paused")
        assert most < held.MAX_OF_SOURCE + 2 * 21 * num_tokens
        answers = [b""] * num_requests

        def read(index: int) -> None:
            answers[index] = read_all(connections[index])

        threads = [threading.Thread(target=read, args=(index,)) for index in range(num_requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, answer in enumerate(answers):
        assert answer.startswith(b"HTTP/1.1 200")
        if number % 2:
            assert "".join(map(TEXTS[path], events_of(answer))) == said_text(num_tokens)
    wait_until(lambda: server.count("held_logprobs") == 0, what="nothing held")


@pytest.mark.slow
def test_requests_with_many_logprobs_end_in_turn(server: ApiServer) -> None:
    """Some of more whole answers than one source may hold wait, none fails."""
    body = {"messages": MESSAGES, "n": 16, "logprobs": True, "top_logprobs": 20}
    num_tokens, num_requests = 800, 5  # 268,800 log-probabilities each
    pauses = server.count("stream_pauses_total")
    texts: list[list[str]] = []

    def ask() -> None:
        transport = httpx.HTTPTransport(uds=server.config.uds)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=WATCHDOG_S) as client:
            answer = client.post("/v1/chat/completions", json=body).raise_for_status()
        choices = orjson.loads(answer.content)["choices"]  # several times as fast as `answer.json()`
        texts.append([choice["message"]["content"] for choice in choices])

    with saying(server, num_tokens, 8):
        threads = [threading.Thread(target=ask) for _ in range(num_requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.count("stream_pauses_total") > pauses
    assert texts == [[said_text(num_tokens, index) for index in range(16)]] * num_requests
    wait_until(lambda: server.count("held_logprobs") == 0, what="nothing held")
