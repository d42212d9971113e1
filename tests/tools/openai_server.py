"""A small server that speaks OpenAI's API as other engines do, for the clients under test: real HTTP over real sockets.

The reply to a prompt of n tokens (words, or ids) is `max_tokens` pieces "w0 ", "w1 ", ...; `behaviour` says how it misbehaves.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = "secret"


@dataclass
class Behaviour:
    has_tokenize: bool = True
    refuse_every: int = 0  # every such request is answered with 429
    status: int = 200  # of whole answers
    cut_every: int = 0  # the stream of every such request ends in the middle
    num_template_tokens: int = 0  # added to each prompt
    tokens_per_word: int = 1
    num_more_tokens: int = 0  # of a word of five letters or more
    error_in_stream: str = ""
    hang_after: int = -1  # pieces, then nothing more until the client leaves
    hang_from: int = 0  # only requests of this number and above hang
    hang_on: tuple[str, ...] = ()  # prompts that get no answer until the client leaves
    events_per_packet: int = 1
    bytes_per_packet: int = 0  # cut the stream in such packets instead
    needs_key: bool = False
    pieces: tuple[str, ...] = ()  # of every reply, in place of the numbered ones
    thoughts: tuple[str, ...] = ()  # reasoning before every reply of a chat


@dataclass
class OpenAIServer:
    """A running server; `requests` are the received bodies with their paths."""

    behaviour: Behaviour
    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_connections: int = 0
    num_disconnects: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.requests if at == path]


@contextlib.contextmanager
def openai_server(behaviour: Behaviour | None = None) -> Iterator[OpenAIServer]:
    state = OpenAIServer(behaviour or Behaviour())

    class Handler(_Handler):
        server_state = state

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: OpenAIServer

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client was killed, or left in the middle of a reply
            self._count_disconnect()

    def setup(self) -> None:
        super().setup()
        with self.server_state.lock:
            self.server_state.num_connections += 1

    def do_GET(self) -> None:
        if self._is_allowed():
            self._json(200, {"object": "list", "data": [{"id": "first", "object": "model"}, {"id": "second"}]})

    def do_POST(self) -> None:
        behaviour = self.server_state.behaviour
        length = int(self.headers["content-length"])
        content = self.rfile.read(length)
        if len(content) < length:  # of a client that was killed
            self.close_connection = True
            return
        body = json.loads(content)
        if not self._is_allowed():
            return
        with self.server_state.lock:
            self.server_state.requests.append((self.path, body))
            number = len(self.server_state.requests)
        if self.path == "/tokenize":
            if not behaviour.has_tokenize:
                self._json(404, {"detail": "Not Found"})
            else:
                self._json(200, {"tokens": list(range(10, 10 + len(body["prompt"].split()))), "count": 1})
        elif behaviour.refuse_every and number % behaviour.refuse_every == 0:
            self._json(429, {"error": {"message": "too many requests", "type": "rate_limit"}})
        elif body.get("stream"):
            self._stream(body, number)
        elif body.get("prompt") in behaviour.hang_on:
            self.rfile.read(1)
            self.close_connection = True
        else:
            self._json(behaviour.status, {"choices": [{"text": "w0 "}], "usage": self._usage(body, 1)})

    def _count_disconnect(self) -> None:
        with self.server_state.lock:
            self.server_state.num_disconnects += 1

    def _is_allowed(self) -> bool:
        if self.server_state.behaviour.needs_key and self.headers["authorization"] != f"Bearer {API_KEY}":
            self._json(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
            return False
        return True

    def _usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        prompt = body["prompt"] if "prompt" in body else " ".join(map(_text_of, body["messages"]))
        behaviour = self.server_state.behaviour
        if isinstance(prompt, list):
            num_prompt_tokens = len(prompt)
        else:
            long_words = sum(len(word) >= 5 for word in prompt.split())
            num_prompt_tokens = len(prompt.split()) * behaviour.tokens_per_word + long_words * behaviour.num_more_tokens
        return {
            "prompt_tokens": num_prompt_tokens + behaviour.num_template_tokens,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        pieces = self.server_state.behaviour.pieces or tuple(f"w{i} " for i in range(body.get("max_tokens", 3)))
        is_chat = "messages" in body

        def choice(piece: str | None, reason: str | None) -> dict[str, Any]:
            if is_chat:
                return {"index": 0, "delta": {"content": piece} if piece is not None else {}, "finish_reason": reason}
            return {"index": 0, "text": piece or "", "finish_reason": reason}

        if is_chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if self.server_state.behaviour.error_in_stream:
            yield json.dumps({"error": {"message": self.server_state.behaviour.error_in_stream}})
            return
        for thought in self.server_state.behaviour.thoughts if is_chat else ():
            yield json.dumps({"choices": [{"index": 0, "delta": {"reasoning_content": thought}}]})
        for piece in pieces:
            yield json.dumps({"choices": [choice(piece, None)], "usage": None})
        yield json.dumps({"choices": [choice(None, "length")], "usage": None})
        yield json.dumps({"choices": [], "usage": self._usage(body, len(pieces))})
        yield "[DONE]"

    def _stream(self, body: dict[str, Any], number: int) -> None:
        behaviour = self.server_state.behaviour
        is_cut = bool(behaviour.cut_every) and number % behaviour.cut_every == 0
        hang_after = behaviour.hang_after if number >= behaviour.hang_from else -1
        events = [f"data: {event}\r\n\r\n".encode() for event in self._events(body)]
        if is_cut:
            events = events[: len(events) // 2]
        if behaviour.bytes_per_packet:
            text = b"".join(events)
            size = behaviour.bytes_per_packet
            packets = [text[i : i + size] for i in range(0, len(text), size)]
        else:
            size = behaviour.events_per_packet
            packets = [b"".join(events[i : i + size]) for i in range(0, len(events), size)]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index, packet in enumerate(packets):
            if index == hang_after:
                self.rfile.read(1)  # returns when the client leaves
                self._count_disconnect()
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%b\r\n" % (len(packet), packet))
        if is_cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
