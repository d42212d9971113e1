"""A user's mistake is a 4xx or a closed connection, never a 5xx, and the engine serves on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.workload import Answer, Body, answers, held, mixed_bodies, stream_all, wait_for_waiting
from tests.waiting import WATCHDOG_S

BODIES = mixed_bodies(6, seed=41, max_tokens=8, max_prompt=30)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """Engine that must answer the same before and after all tests of this module, without a 5xx."""
    options = ("--max-model-len", "256", "--num-kv-blocks", "40", "--max-waiting", "64", "--trust-request-chat-template")
    options += ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")
    with EngineProcess(GOLDEN / "qwen3", *options) as running:
        before = answers(running, BODIES)
        yield running
        running.wait_until_idle()
        assert answers(running, BODIES) == before
        assert running.metric("http_responses_total", status="5xx") == 0
        assert running.metric("actor_restarts_total") == 0


def post(engine: EngineProcess, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{engine.url}{path}", timeout=WATCHDOG_S, headers={**OPERATOR, **options.pop("headers", {})}, **options)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
        b'{"prompt": "a"',
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/show", "/tokenize", "/detokenize", "/admin/abort"),
    ],
)
def test_malformed_bodies(engine: EngineProcess, path: str, content: bytes) -> None:
    answer = post(engine, path, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error if path.startswith("/api/") else error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", [10**12]),
        ("prompt", [1024]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("n", 0),
        ("n", 65),
        ("n", 100_000),
        ("best_of", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", 50),
        ("logprobs", 1000),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 1000),
        ("stop_token_ids", [99999]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [99999]),
        ("bad_words", [""]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", [1]),
        ("seed", "x"),
        ("seed", 2**70),
        ("stream", "yes"),
        ("stream_options", 5),
        ("echo", "x"),
        ("priority", "x"),
        ("priority", 2**70),
        ("timeout", -1),
        ("model", 5),
        ("suffix", "x"),
        ("typical_p", 0),
        ("top_n_sigma", "x"),
        ("xtc_probability", 1.5),
        ("dry_base", 0.5),
        ("dry_sequence_breakers", [""]),
        ("cache_salt", ""),
        ("logprob_token_ids", [1]),
        ("truncate_prompt_tokens", 0),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("return_progress", True),
    ],
)
def test_wrong_parameters_name_themselves(engine: EngineProcess, param: str, value: Any) -> None:
    answer = post(engine, json={"prompt": "hello", "max_tokens": 4, param: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"]
    assert (error["param"] or "").split(".")[0].split("[")[0] == param, error


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "nothing"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
    ],
)
def test_wrong_messages(engine: EngineProcess, messages: Any) -> None:
    answer = post(engine, "/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith("messages")


@pytest.mark.parametrize(
    "template",
    [
        "{{",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ raise_exception('no') }}",
        r"{{ raise_exception('\ud800') }}",
        "{{ messages[99].content }}",
    ],
)
def test_hostile_templates(engine: EngineProcess, template: str) -> None:
    answer = post(engine, "/v1/chat/completions", json=with_template(template))
    assert answer.status_code == 400, answer.text


def with_template(template: str) -> Body:
    return {"messages": [{"role": "user", "content": "x"}], "chat_template": template, "max_tokens": 4}


def test_streams_beside_hostile_templates(engine: EngineProcess) -> None:
    """Requests of other senders are all answered before the last of four with hostile templates."""

    async def run() -> tuple[list[Answer], bool, list[int]]:
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S) as client:
            body = with_template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
            hostile = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(4)]
            found = await stream_all(engine.url, BODIES, len(BODIES))
            is_first = not all(task.done() for task in hostile)
            return found, is_first, [answer.status_code for answer in await asyncio.gather(*hostile)]

    before = answers(engine, BODIES)
    assert asyncio.run(run()) == (before, True, [400] * 4)


def test_too_long_prompts_say_the_numbers(engine: EngineProcess) -> None:
    answer = post(engine, json={"prompt": [5] * 300, "max_tokens": 4})
    assert answer.status_code == 400
    assert "300" in answer.text
    assert "256" in answer.text
    assert post(engine, json={"prompt": "x" * 3_000_000}).status_code == 400


def test_a_huge_body_is_refused_unread(engine: EngineProcess) -> None:
    answer = post(engine, content=b'{"prompt": "' + b"a" * (64 << 20) + b'"}')
    assert answer.status_code == 413


def test_unknown_places(engine: EngineProcess) -> None:
    assert post(engine, json={"model": "nobody", "prompt": "a"}).status_code == 404
    assert post(engine, "/v1/nothing", json={}).status_code == 404
    assert httpx.get(f"{engine.url}/v1/completions", timeout=WATCHDOG_S).status_code == 405
    assert post(engine, "/admin/actors/scheduler9/restart", json={}).status_code == 404


def test_a_full_queue_is_429_with_retry_after(engine: EngineProcess) -> None:
    """64 of 300 requests may wait while nothing runs; the accepted ones are answered."""

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S, limits=limits) as client:
            body = {"prompt": [7] * 30, "max_tokens": 60, "ignore_eos": True}
            async with held(engine):
                posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(300)]
                refusals = asyncio.as_completed(posts)
                for _ in range(236):
                    assert (await next(refusals)).status_code == 429
                await asyncio.to_thread(wait_for_waiting, engine, 64)
            return list(await asyncio.gather(*posts))

    results = asyncio.run(run())
    refused = [result for result in results if result.status_code == 429]
    assert {result.status_code for result in results} == {200, 429}
    assert len(refused) == 236
    assert all(int(result.headers["retry-after"]) >= 1 for result in refused)


def test_deadline_of_a_waiting_request(engine: EngineProcess) -> None:
    """Deadlines of running requests are in `test_reload.py`, where answers are long."""

    async def overdue() -> httpx.Response:
        body = {"prompt": [7], "max_tokens": 250, "ignore_eos": True, "timeout": 0.05}
        async with held(engine):
            return await asyncio.to_thread(post, engine, json=body)

    answer = asyncio.run(overdue())
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "timeout")
    assert answer.json()["usage"]["completion_tokens"] == 0


def test_half_sent_bodies_and_stalled_connections(engine: EngineProcess) -> None:
    """500 connections that send half a request and stall; the engine answers others meanwhile."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 1.1.1.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    starts = [b"", b"POST /v1/comp", head]
    with contextlib.ExitStack() as stack:
        for index in range(500):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", engine.port), timeout=WATCHDOG_S))
            client.sendall(starts[index % 3])
        assert len(answers(engine, BODIES)) == len(BODIES)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"A" * 100_000,
    ],
)
def test_bytes_that_are_not_http(engine: EngineProcess, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", engine.port), timeout=WATCHDOG_S) as client:
        client.sendall(nonsense)
        reply = b"".join(iter(lambda: client.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score"])
def test_vectors_of_a_model_that_generates(engine: EngineProcess, path: str) -> None:
    answer = post(engine, path, json={"input": "a", "query": "a", "documents": ["a"], "text_1": "a", "text_2": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_model", "model")
    assert "text generation" in error["message"]


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
STRANGE: dict[str, Any] = {
    "type": 7,
    "properties": {"a": 1, "b": {"$ref": "#/$defs/b"}},
    "required": 3,
    "$defs": {"b": {"$ref": "#/$defs/b"}},
}


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize(
    "functions",
    [
        [{"name": "f", "parameters": DEEP, "strict": True}],
        [{"name": "f", "parameters": STRANGE, "strict": True}],
        [
            {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1,500}){1,500}"}}},
            }
        ],
        [{"name": "f" * 128, "parameters": {"type": "object", "properties": {"p" * 10_000: {"type": "string"}}}}],
        [{"name": f"f{index}", "strict": True} for index in range(2000)],
        [
            {
                "name": "f",
                "parameters": {"type": "object", "properties": {f"p{index}": {"enum": ["a"]} for index in range(2000)}},
            }
        ],
        [{"name": ""}],
        [{"name": "f", "parameters": []}],
        [{}],
    ],
)
def test_hostile_tools(engine: EngineProcess, functions: list[Any], choice: str) -> None:
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice, "max_tokens": 4}
    answer = post(engine, "/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("tools"), answer.text
