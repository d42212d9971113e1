"""Streams: their events, clients that leave or do not read, and crashes behind the api."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from api.client.client import MAX_CALLS
from engine.messages import Delta, Deltas, Rejected, Tokenize, Tokenized
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import DEFAULT_NUM_TOKENS, said, said_text
from tests.waiting import WATCHDOG_S, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Reader:
    """Reader of one stream, in a thread."""

    def __init__(self, server: ApiServer, request_id: str, **fields: Any) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.response: httpx.Response | None = None
        self._client = httpx.Client(base_url=server.url, timeout=WATCHDOG_S)
        body = {"prompt": "hello", "stream": True, "return_token_ids": True, "max_tokens": DEFAULT_NUM_TOKENS, **fields}
        self._thread = threading.Thread(target=self._read, args=(body, request_id))
        self._thread.start()

    def _read(self, body: dict[str, Any], request_id: str) -> None:
        with self._client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": request_id}) as response:
            self.response = response
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(orjson.loads(line[6:]))

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in list(self.chunks) for choice in chunk.get("choices", [])]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for choice in self.choices for token_id in choice["token_ids"]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    def finish(self) -> None:
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()
        self._client.close()


@pytest.fixture
def paced(server: ApiServer) -> Iterator[ApiServer]:
    """Server that stops each sequence after 10 tokens until the test gives more credits."""
    with server.paced(10):
        yield server


# -------------------------------------------------------------------------------------------------------------- events


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, n=2, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == said_text(30, index)
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert (chunks[-1].model_extra or {})["weight_version"] == "1"


def test_chat_stream_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=30, stream=True, logprobs=True, top_logprobs=1
    )
    entries = [
        entry for chunk in stream for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content or []
    ]
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == said(30)


def test_usage_events(server: ApiServer) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = events(server.post("/v1/completions", body))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert last["weight_version"] == "1"
    assert all(piece["usage"] is None for piece in pieces)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, _ = events(server.post("/v1/completions", body))
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    del body["stream_options"]
    assert all("usage" not in piece for piece in events(server.post("/v1/completions", body)))


def test_completion_stream_equals_the_whole(server: ApiServer) -> None:
    body = {"prompt": ["a\xfc", "b"], "n": 2, "max_tokens": 40, "echo": True, "logprobs": 2, "return_token_ids": True}
    whole = server.post("/v1/completions", body).json()["choices"]
    pieces = [
        choice for event in events(server.post("/v1/completions", {**body, "stream": True})) for choice in event["choices"]
    ]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [token_id for piece in own for token_id in piece["token_ids"]] == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key, values in choice["logprobs"].items():
            assert [value for piece in own for value in piece["logprobs"][key]] == values
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_scoring_stream(server: ApiServer) -> None:
    (event,) = events(server.post("/v1/completions", {"prompt": "abc", "max_tokens": 0, "echo": True, "stream": True}))
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("abc", "length")


def test_headers(server: ApiServer) -> None:
    response = server.post("/v1/completions", {"prompt": "hello", "stream": True}, headers={"x-request-id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-tokamak-weight-version"] == "1"
    assert "content-length" not in response.headers


def test_async_streams_at_once(server: ApiServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(num_tokens: int) -> str:
                stream = await client.completions.create(model="tiny", prompt="x", max_tokens=num_tokens, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(one(num_tokens) for num_tokens in range(20, 52))))

    texts = asyncio.run(run())
    assert texts == [said_text(num_tokens) for num_tokens in range(20, 52)]
    assert server.count("open_requests") == 0


# -------------------------------------------------------------------------------------------------------------- errors


def test_error_before_the_first_token_is_an_answer(server: ApiServer) -> None:
    response = server.post("/v1/completions", {"prompt": "!reject 429", "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json() == {
        "error": {"message": "refused", "type": "rate_limit_error", "param": "prompt", "code": "some_code"}
    }


def test_error_after_the_first_token_is_an_event(paced: ApiServer) -> None:
    reader = Reader(paced, "late-error")
    wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens")
    (submit,) = paced.peer.submits("late-error~")
    paced.peer.send(Rejected(submit.request_id, submit.attempt, "api0", 500, "out of luck"))
    reader.finish()
    assert reader.chunks[-1] == {"error": {"message": "out of luck", "type": "server_error", "param": None, "code": None}}


def test_one_rejected_sequence_ends_the_request(paced: ApiServer) -> None:
    response = paced.post("/v1/completions", {"prompt": ["hello", "!reject 400"]}, headers={"x-request-id": "half"})
    assert response.status_code == 400
    wait_until(lambda: len(paced.peer.aborts("half~")) == 1, what="the other sample aborted")
    assert paced.count("open_requests") == 0


# ------------------------------------------------------------------------------------------------- clients that do not wait


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}])
def test_leaving_client_aborts_its_sequences(paced: ApiServer, fields: dict[str, bool]) -> None:
    """The sequences are aborted as soon as their client has left."""
    name = f"leaver-{fields['stream']}"
    before = paced.count("http_disconnects_total"), paced.count("request_success_total", finished_reason="abort")
    body = orjson.dumps({"prompt": "hello", "n": 2, **fields})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (
        name.encode(),
        len(body),
    )
    with socket.create_connection(("127.0.0.1", paced.port)) as connection:
        connection.sendall(head + body)
        wait_until(lambda: len(paced.peer.submits(name)) == 2, what="both samples submitted")
    wait_until(lambda: len(paced.peer.aborts(name)) == 2, what="both samples aborted")
    assert paced.count("http_disconnects_total") == before[0] + 1
    wait_until(lambda: paced.count("request_success_total", finished_reason="abort") == before[1] + 2, what="both counted")
    wait_until(lambda: paced.count("open_requests") == 0, what="nothing open")


def test_calls_are_bounded_and_end_with_their_clients(server: ApiServer) -> None:
    """New calls are refused while the tokenizer does not answer /tokenize, and calls of clients that left are cancelled."""
    body = orjson.dumps({"prompt": "hello"})
    request = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    before = server.count("cancelled_calls_total")
    server.peer.is_answering_calls = False
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, server.peer, "is_answering_calls", True)
        for _ in range(MAX_CALLS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(request)
        wait_until(lambda: server.count("open_calls") == MAX_CALLS, what="all asked")
        refused = server.post("/tokenize", {"prompt": "hello"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        other = socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0))
        stack.enter_context(other).sendall(request)
        wait_until(lambda: server.count("open_calls") == MAX_CALLS + 1, what="another's")
    wait_until(lambda: server.count("open_calls") == 0, what="all called off")
    wait_until(lambda: server.count("cancelled_calls_total") == before + MAX_CALLS + 1, what="all counted")
    calls = {message.call_id for message in server.peer.received if isinstance(message, Tokenize)}
    wait_until(lambda: len(calls.intersection(each.request_id for each in server.peer.aborts())) == MAX_CALLS + 1, what="told")
    assert server.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]


def test_a_client_that_leaves_within_its_body(server: ApiServer) -> None:
    before = server.count("http_disconnects_total")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: server.count("http_disconnects_total") == before + 1, what="disconnect counted")


def test_slow_reader_gets_everything(server: ApiServer) -> None:
    """Output is gathered while the client does not read, and is complete afterwards."""
    body = orjson.dumps({"prompt": "x" * 200, "stream": True, "max_tokens": 256, "logprobs": 20, "n": 8})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        before = server.count("request_success_total", finished_reason="length")
        connection.sendall(head + body)
        wait_until(
            lambda: server.count("request_success_total", finished_reason="length") == before + 8, what="all samples ended"
        )
        received = bytearray()
        while part := connection.recv(65536):
            received += part
    assert received.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in received
    assert received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("chat", [False, True])
def test_unread_stream_is_paused_and_continues(server: ApiServer, chat: bool) -> None:
    """Output that waits for a reader is bounded; once it reads, everything arrives once and in order."""
    num_samples, pauses = 64, server.count("stream_pauses_total")
    if chat:
        fields: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    else:
        fields = {"prompt": "x", "logprobs": 20}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = orjson.dumps(fields | {"stream": True, "n": num_samples, "max_tokens": DEFAULT_NUM_TOKENS})
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as connection:
        connection.settimeout(WATCHDOG_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + body)
        wait_until(lambda: server.count("stream_pauses_total") > pauses, what="paused")
        wait_until(lambda: not server.peer.streams, what="nothing in the engine")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = bytearray()
        while part := connection.recv(1 << 20):
            received += part
    texts = ["" for _ in range(num_samples)]
    for line in received.split(b"data: ")[1:]:
        if b'"choices"' in line:
            for choice in orjson.loads(line[: line.rindex(b"}") + 1])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
    assert texts == [said_text(DEFAULT_NUM_TOKENS, index) for index in range(num_samples)]


# --------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("victim", ["tokenizer", "scheduler"])
def test_stream_survives_a_crash_behind_the_api(paced: ApiServer, victim: str) -> None:
    name = f"survivor-{victim}"
    reader = Reader(paced, name, logprobs=1, n=1)
    wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens")
    before = paced.count("resubmissions_total", cause=victim)
    if victim == "tokenizer":
        paced.restart_tokenizer()
    else:
        paced.begin("scheduler", paced.counters.actor("scheduler").epoch + 1)
    wait_until(lambda: len(paced.peer.submits(name)) == 2, what="submitted again")
    first, second = paced.peer.submits(name)
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.resume_token_ids == b"".join(token.to_bytes(4, "little") for token in said(10))
    assert (second.request_id, second.prompt, second.sampling) == (first.request_id, first.prompt, first.sampling)
    paced.peer.send(Deltas([Delta(first.request_id, 0, [1, 2, 3], "stale")]))
    paced.peer.weight_version = 2
    paced.peer.credits = None
    reader.finish()
    paced.peer.weight_version = 1
    assert bytes(reader.token_ids) == said(DEFAULT_NUM_TOKENS)
    assert reader.text == said_text(DEFAULT_NUM_TOKENS)
    assert reader.response is not None
    assert reader.response.headers["x-tokamak-weight-version"] == "1"
    assert reader.chunks[-1]["weight_version"] == "1,2"
    assert paced.count("resubmissions_total", cause=victim) == before + 1


def test_request_moves_again_when_its_new_replica_dies(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The request is submitted again with its present attempt, which got no answer yet, not with the replica that it had
    before."""
    with ApiServer(tmp_path_factory.mktemp("run"), data_parallel_size=2) as server:
        server.peer.credits, server.peer.replica = 10, 1
        reader = Reader(server, "moved", logprobs=1, n=1)
        wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens, of replica 1")
        for num_before, scheduler in enumerate(("scheduler1", "scheduler0", "scheduler1"), 1):
            server.begin(scheduler, server.counters.actor(scheduler).epoch + 1)
            wait_until(lambda count=num_before: len(server.peer.submits("moved")) > count, what="submitted again")
        server.peer.credits, server.peer.replica = None, 0
        reader.finish()
        assert bytes(reader.token_ids) == said(DEFAULT_NUM_TOKENS)
        submits = server.peer.submits("moved")
        assert [(submit.attempt, submit.replica) for submit in submits] == [(0, -1), (1, 1), (2, -1), (3, -1)]
        assert reader.response is not None
        assert reader.response.headers["x-tokamak-replica"] == "1"


def test_full_queue_after_a_crash_loses_no_answer(paced: ApiServer) -> None:
    """All open sequences come back at once; one that is rejected by a full scheduler is submitted again."""
    reader = Reader(paced, "back-in-line")
    wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens")
    paced.begin("scheduler", paced.counters.actor("scheduler").epoch + 1)
    wait_until(lambda: len(paced.peer.submits("back-in-line")) == 2, what="submitted again")
    again = paced.peer.submits("back-in-line")[1]
    paced.peer.send(Rejected(again.request_id, again.attempt, "api0", 429, "full", "too_many_requests", "", 1))
    wait_until(lambda: len(paced.peer.submits("back-in-line")) == 3, what="and again")
    assert paced.peer.submits("back-in-line")[2].attempt == 2
    paced.peer.credits = None
    reader.finish()
    assert bytes(reader.token_ids) == said(DEFAULT_NUM_TOKENS)


@pytest.mark.slow
def test_only_sequences_of_the_dead_tokenizer_move(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All sequences of a prompt go to one tokenizer; those of the other one are left alone."""
    with ApiServer(tmp_path_factory.mktemp("run"), tokenizer_processes=2) as server, contextlib.ExitStack() as stack:
        dies, lives = server.peers
        dies.credits = lives.credits = 5
        readers = [Reader(server, f"id-{index}", n=2) for index in range(12)]
        for reader in readers:
            stack.callback(reader.finish)
        stack.callback(setattr, dies, "credits", None)
        stack.callback(setattr, lives, "credits", None)
        wait_until(lambda: all(len(reader.token_ids) == 10 for reader in readers), what="five tokens each")
        on_each = [{submit.group_id for submit in peer.submits()} for peer in server.peers]
        assert min(map(len, on_each)) > 0
        assert not on_each[0] & on_each[1]
        num_on_each = [len(peer.submits()) for peer in server.peers]
        server.restart_tokenizer()
        wait_until(lambda: len(dies.submits()) == 2 * num_on_each[0], what="submitted again")
        stack.close()
        assert len(lives.submits()) == num_on_each[1]
        for reader in readers:
            assert {len(reader.token_ids)} == {2 * DEFAULT_NUM_TOKENS}
            for index in (0, 1):
                own = [choice["text"] for choice in reader.choices if choice["index"] == index]
                assert "".join(own) == said_text(DEFAULT_NUM_TOKENS, index)


def test_prompt_logprobs_are_not_asked_for_twice(paced: ApiServer) -> None:
    with httpx.Client(base_url=paced.url, timeout=WATCHDOG_S) as client:
        answers: list[httpx.Response] = []
        body = {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 20, "return_token_ids": True}
        asking = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body, headers={"x-request-id": "scored"}))
        )
        asking.start()
        wait_until(lambda: paced.peer.streams and paced.peer.streams[paced.peer.submits("scored")[0].request_id].num_sent == 10)
        paced.restart_tokenizer()
        paced.peer.credits = None
        asking.join()
    choice = answers[0].json()["choices"][0]
    assert paced.peer.submits("scored")[1].num_scored_prompt_tokens == 2
    assert len(choice["prompt_logprobs"]) == 3
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["text"] == said_text(20)


def test_calls_and_aborts_survive_a_tokenizer(paced: ApiServer) -> None:
    paced.peer.is_answering_calls = False
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(paced.post("/tokenize", {"prompt": "ab"})))
    with contextlib.ExitStack() as stack:
        stack.callback(asking.join)
        num_before = len(paced.peer.received)
        asking.start()
        wait_until(lambda: len(paced.peer.received) > num_before, what="call there")
        reader = Reader(paced, "aborted-before")
        wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens")
        assert paced.order("abort", {"request_id": "aborted-before"}).status_code == 200
        reader.finish()
        wait_until(lambda: len(paced.peer.aborts("aborted-before")) == 1, what="aborted")
        paced.restart_tokenizer()
        wait_until(lambda: len(paced.peer.aborts("aborted-before")) == 2, what="the new tokenizer hears of it")

        def attempts() -> list[tuple[str, int]]:
            calls = [message for message in paced.peer.received[num_before:] if isinstance(message, Tokenize)]
            return [(call.call_id, call.attempt) for call in calls]

        (call_id, first), (_, second) = wait_until(lambda: len(attempts()) == 2 and attempts(), what="the call comes again")
        assert (first, second) == (0, 1)  # it takes no new request's place
        paced.peer.send(Rejected(call_id, 0, "api0", 429, "what the ring still had of the first one"))
        paced.peer.send(Tokenized(call_id, array("i", [97, 98]).tobytes(), 256))
    paced.peer.is_answering_calls = True
    assert answers[0].json()["tokens"] == [97, 98]
    assert reader.choices[-1]["finish_reason"] == "abort"


@pytest.mark.slow
def test_a_full_ring_delays_its_sender_alone(paced: ApiServer) -> None:
    """A tokenizer does not read: a request larger than the ring waits, and later requests pass it."""
    reader = Reader(paced, "before-the-jam")
    wait_until(lambda: len(reader.token_ids) == 10, what="ten tokens")
    resubmitted = paced.count("resubmissions_total", cause="scheduler")
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, prompts: list[str]) -> threading.Thread:
        body = {"prompt": prompts, "max_tokens": 1}
        post = lambda: answers.update({name: paced.post("/v1/completions", body, headers={"x-request-id": name})})  # noqa: E731
        thread = threading.Thread(target=post)
        thread.start()
        return thread

    with contextlib.ExitStack() as stack:
        paced.peer.is_reading = False
        stack.callback(setattr, paced.peer, "is_reading", True)
        asking = [ask("large", ["x" * 50_000] * 100)]
        wait_until(lambda: paced.count("open_requests") == 101, what="longer than the ring: it waits")
        asking += [ask(f"small-{index}", ["x"]) for index in range(20)]
        wait_until(lambda: paced.count("open_requests") == 121, what="not refused")
        paced.begin("scheduler", paced.counters.actor("scheduler").epoch + 1)
        wait_until(lambda: paced.count("resubmissions_total", cause="scheduler") == resubmitted + 121, what="resubmissions due")
    paced.peer.credits = None
    reader.finish()
    assert bytes(reader.token_ids) == said(DEFAULT_NUM_TOKENS)
    assert len(paced.peer.submits("before-the-jam")) == 2
    for thread in asking:
        thread.join(WATCHDOG_S)
    assert {name: len(answer.json()["choices"]) for name, answer in answers.items()} == {
        "large": 100,
        **{f"small-{index}": 1 for index in range(20)},
    }
    order = [submit.request_id.partition("~")[0] for submit in paced.peer.submits() if submit.attempt == 1]
    assert max(order.index(f"small-{index}") for index in range(20)) < len(order) - 1 - order[::-1].index("large")


def test_request_longer_than_the_ring_succeeds(server: ApiServer) -> None:
    response = server.post("/v1/completions", {"prompt": ["x" * 100_000] * 40, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 40


def test_deadlines_hold_without_a_scheduler(paced: ApiServer) -> None:
    paced.peer.credits = 0
    answer = paced.post("/v1/completions", {"prompt": "x", "timeout": 0.2}, headers={"x-request-id": "late"}).json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    wait_until(lambda: [abort.reason for abort in paced.peer.aborts("late~")] == ["timeout"], what="told to the engine")
