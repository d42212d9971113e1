"""Streams that are silent for long: their head, keep-alives for proxies, errors, progress of a prompt."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from engine.messages import Delta, Deltas, Rejected
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import WATCHDOG_S, wait_until

KEEP_ALIVE = ": keep-alive"


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Server that lets its streams be silent for 20 ms."""
    with ApiServer(tmp_path_factory.mktemp("run"), sse_keep_alive_interval_s=0.02) as running:
        yield running


class Proxy:
    """Proxy of one connection that cuts it when the server sent nothing between two ticks of a clock, which the test moves."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.num_received = 0
        self._num_at_tick = 0
        self._server = socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S)
        self._threads = [threading.Thread(target=self._pass_on)]
        self._threads[0].start()

    def has_heard(self) -> bool:
        """Whether the server sent something since the last tick."""
        return self.num_received > self._num_at_tick

    def tick(self) -> None:
        assert self.has_heard(), "cut"
        self._num_at_tick = self.num_received

    def _pass_on(self) -> None:
        client, _ = self._listener.accept()
        self._threads.append(threading.Thread(target=self._pump, args=(client, self._server)))
        self._threads[1].start()
        while part := self._server.recv(1 << 16):
            self.num_received += len(part)
            client.sendall(part)
        client.close()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                server.sendall(part)
            server.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._server.close()


class Reader:
    """Reader of a stream's lines, in a thread."""

    def __init__(self, url: str, name: str, **fields: Any) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.headers = httpx.Headers()
        self._thread = threading.Thread(target=self._read, args=(url, name, {"prompt": "hello", "stream": True, **fields}))
        self._thread.start()

    def _read(self, url: str, name: str, body: dict[str, Any]) -> None:
        headers = {"x-request-id": name, "connection": "close"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=WATCHDOG_S) as answer:
            self.headers, self.status = answer.headers, answer.status_code
            self.lines += answer.iter_lines() if answer.status_code == 200 else [answer.read().decode()]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [orjson.loads(line[6:]) for line in list(self.lines) if line.startswith("data: {")]

    def finish(self) -> None:
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()


def test_a_prompt_that_takes_long_outlives_a_proxy(silent: ApiServer) -> None:
    proxy = Proxy(silent.port)
    try:
        with silent.paced(0):
            reader = Reader(f"http://127.0.0.1:{proxy.port}", "through-proxy", max_tokens=5)
            for _ in range(4):
                wait_until(proxy.has_heard, what="some bytes")
                proxy.tick()
        reader.finish()
    finally:
        proxy.close()
    assert reader.status == 200
    assert "x-tokamak-weight-version" not in reader.headers  # unknown when the head was sent
    assert reader.lines.count(KEEP_ALIVE) >= 3
    assert "".join(event["choices"][0]["text"] for event in reader.events) == said_text(5)
    assert reader.events[-1]["weight_version"] == "1"
    assert [line for line in reader.lines if line][-1] == "data: [DONE]"


def test_silence_within_an_answer(silent: ApiServer) -> None:
    with silent.paced(3):
        reader = Reader(silent.url, "within", max_tokens=5)
        wait_until(lambda: KEEP_ALIVE in list(reader.lines), what="kept alive")
    reader.finish()
    assert "".join(event["choices"][0]["text"] for event in reader.events) == said_text(5)


def test_early_errors_are_statuses_later_ones_events(silent: ApiServer) -> None:
    refused = Reader(silent.url, "at-once", prompt="!reject 429")
    refused.finish()
    assert (refused.status, refused.headers["retry-after"]) == (429, "7")
    with silent.paced(0):
        late = Reader(silent.url, "late")
        wait_until(lambda: KEEP_ALIVE in list(late.lines), what="the head and a comment")
        (submit,) = silent.peer.submits("late~")
        silent.peer.send(Rejected(submit.request_id, 0, submit.api, 400, "refused", "some_code", "prompt"))
        late.finish()
    assert late.status == 200
    assert [event["error"]["code"] for event in late.events] == ["some_code"]
    assert [line for line in late.lines if line][-1] == "data: [DONE]"


def test_an_ordinary_stream_has_no_comments(server: ApiServer) -> None:
    reader = Reader(server.url, "ordinary", max_tokens=5)
    reader.finish()
    assert KEEP_ALIVE not in reader.lines
    assert reader.headers["x-tokamak-weight-version"] == "1"


def test_progress_of_prompts(server: ApiServer) -> None:
    """Two prompts of two sequences each: only growth is reported, also after a crash."""
    with server.paced(0):
        reader = Reader(server.url, "progress", prompt=["hello", "you"], n=2, return_progress=True, max_tokens=2)
        submits = wait_until(lambda: server.peer.submits("progress~") if len(server.peer.submits("progress~")) == 4 else [])
        assert all(submit.options.returns_progress for submit in submits)

        def tell(index: int, num_computed: int, num_events: int) -> None:
            delta = Delta(submits[index].request_id, submits[index].attempt, [], "", num_prompt_tokens=9, num_cached_tokens=4)
            delta.num_computed_tokens = num_computed
            server.peer.send(Deltas([delta]))
            wait_until(lambda: len(reader.events) == num_events, what="told")

        tell(0, 6, 1)
        tell(0, 5, 1)
        tell(2, 7, 2)
        tell(0, 9, 3)
    reader.finish()
    told = [event["prompt_progress"] for event in reader.events if "prompt_progress" in event]
    assert [(one["total"], one["cache"], one["processed"]) for one in told] == [(9, 4, 6), (18, 8, 13), (18, 8, 16)]
    assert all(event["choices"] == [] for event in reader.events if "prompt_progress" in event)
    refused = server.post("/v1/completions", {"prompt": "x", "return_progress": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_progress")
