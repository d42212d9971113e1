"""Who may do what: API keys, the admin key, the loopback rule, and the orders themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from starlette.datastructures import Headers

from api.auth import priority_of
from engine.errors import RequestError
from engine.messages import (
    AbortRequest,
    DropWeights,
    ListActors,
    Order,
    Pause,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    RestartActor,
    Resume,
)
from tests.api.edge import Edge
from tests.waiting import wait_until

KEYS = {"api_key": ("first", "s\xe9cond"), "api_key_priority": (("s\xe9cond", 10),), "admin_key": "master"}
OPEN_PATHS = ("/", "/health", "/health/live", "/metrics", "/version", "/load", "/openapi.json")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with Edge(tmp_path_factory.mktemp("run"), **KEYS) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_api_keys(guarded: Edge) -> None:
    for path in OPEN_PATHS:
        assert guarded.get(path).status_code == 200, path
    for headers in ({}, bearer("wrong"), bearer("master"), {"authorization": "Basic first"}, {"authorization": "first"}):
        answer = guarded.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/v1/models", headers=bearer("first")).status_code == 200
    assert guarded.get("/v1/models", headers={b"authorization": "bearer s\xe9cond".encode()}).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"):
        assert guarded.post(path, {}).status_code == 401
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first") as client:
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].text == "P"


def test_priority_of_keys(guarded: Edge) -> None:
    """A key's own priority is the best that its requests get; where requests may not choose, those that do are refused."""
    for key, asked, expected in (
        ("s\xe9cond", None, 10),
        ("s\xe9cond", -5, 10),
        ("s\xe9cond", 20, 20),
        ("first", -5, -5),
        ("first", None, 0),
    ):
        body = {"prompt": "x", "max_tokens": 1, "priority": asked}
        assert guarded.post("/v1/completions", body, headers={b"authorization": f"Bearer {key}".encode()}).status_code == 200
        assert guarded.peer.submits()[-1].priority == expected, (key, asked)
    strict = msgspec.structs.replace(guarded.config, request_priority=False)
    assert [priority_of(Headers(bearer("first")), asked, strict) for asked in (None, 0)] == [0, 0]
    for asked in (1, -1):
        with pytest.raises(RequestError, match="--no-request-priority") as error:
            priority_of(Headers(bearer("first")), asked, strict)
        assert (error.value.status, error.value.param) == (400, "priority")


def test_admin_key(guarded: Edge) -> None:
    assert guarded.get("/admin/actors").status_code == 401
    assert guarded.get("/admin/actors", headers=bearer("first")).status_code == 401
    assert guarded.get("/admin/actors", headers={**bearer("master"), "x-forwarded-for": "1.2.3.4"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"host": "evil.example:8000"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_without_a_key_only_this_machine(edge: Edge, headers: dict[str, str]) -> None:
    """No proxy, no foreign page, no name that a foreign DNS server could have pointed here."""
    answer = edge.post("/admin/pause", {}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert not any(isinstance(order, Pause) for order in edge.orders)


def test_a_page_of_our_own_may(edge: Edge) -> None:
    assert edge.post("/admin/resume", {}, headers={"origin": edge.url}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("actors/worker0/restart", {}, RestartActor("worker0")),
        ("actors/worker0/restart", None, RestartActor("worker0")),
        ("pause", {}, Pause("abort", "pause")),
        ("pause", {"mode": "wait"}, Pause("wait", "pause")),
        ("resume", None, Resume()),
        ("sleep", {"mode": "keep"}, Pause("keep", "sleep")),
        ("wake", {}, Resume()),
        ("reset_prefix_cache", {}, ResetPrefixCache()),
        ("reload", {"path": "/weights", "mode": "wait", "ranks": [1]}, ReloadWeights("/weights", "wait", [1])),
        ("reload", {}, ReloadWeights("", "requeue", [])),
        ("clear_weights", {}, DropWeights("abort")),
        ("abort", {"request_id": "of-another-process"}, AbortRequest("of-another-process")),
    ],
)
def test_orders(edge: Edge, path: str, body: Any, order: Order) -> None:
    answer = edge.post(f"/admin/{path}", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"] == "done"
    assert edge.orders.pop() == order


def test_answers_of_orders(edge: Edge) -> None:
    ordinary = edge.answer
    try:
        edge.answer = lambda order: Reply("", 200, "", {"actors": [{"name": "api0", "pid": 1}]})
        assert edge.get("/admin/actors").json()["actors"] == [{"name": "api0", "pid": 1}]
        assert edge.orders.pop() == ListActors()
        edge.answer = lambda order: Reply("", 409, "the engine is PAUSED")
        refused = edge.post("/admin/pause", {})
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "the engine is PAUSED")
    finally:
        edge.answer = ordinary


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pause", {"mode": "maybe"}),
        ("reload", {"ranks": [-1]}),
        ("reload", {"path": 5}),
        ("abort", {}),
        ("abort", {"request_id": ""}),
    ],
)
def test_wrong_orders(edge: Edge, path: str, body: Any) -> None:
    answer = edge.post(f"/admin/{path}", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


def test_abort_by_the_id_that_the_client_knows(edge: Edge) -> None:
    with edge.paced(3):
        answers = []
        body = {"prompt": ["a", "b"], "n": 2}
        asking = threading.Thread(
            target=lambda: answers.append(edge.post("/v1/completions", body, headers={"x-request-id": "to-be-aborted"}))
        )
        asking.start()
        wait_until(lambda: len(edge.peer.submits("to-be-aborted~")) == 4, what="submitted")
        wait_until(lambda: all(s.num_sent == 3 for s in list(edge.peer.streams.values())), what="three tokens each")
        assert edge.post("/admin/abort", {"request_id": "to-be-aborted"}).status_code == 200
        asking.join()
    assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == ["abort"] * 4
    wait_until(lambda: len(edge.peer.aborts("to-be-aborted~")) == 4, what="told to the engine")
