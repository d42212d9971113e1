"""`--log-requests` and `--log-format json`: fields that are logged of requests, never their text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.api_server import ApiServer
from tests.waiting import wait_until

SECRET = "xyzzy-plugh"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("run"), log_requests=True, log_format="json") as running:
        yield running
        running.run.log_path("api0").write_text("")  # it complained of nothing


def lines(server: ApiServer, request_id: str) -> list[dict[str, Any]]:
    """Return the log lines of a request; the last one follows its answer."""

    def found() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in server.run.log_path("api0").read_text().splitlines()]
        own = [line for line in logged if line.get("id") == request_id]
        return own if own and own[-1]["message"] == "request answered" else []

    return wait_until(found, what=f"the lines of {request_id}")


def both_lines(server: ApiServer, request_id: str) -> list[dict[str, Any]]:
    """Return a request's first line and its last, which is written once the client has the answer."""
    wait_until(lambda: len(lines(server, request_id)) == 2, what=f"{request_id} is logged")
    return lines(server, request_id)


def test_a_request_is_logged_without_its_text(server: ApiServer) -> None:
    body = {
        "prompt": [f"{SECRET} one", f"{SECRET} two"],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 7,
        "stop": [SECRET],
        "logit_bias": {"5": 1.0},
        "stop_token_ids": [3, 4],
        "user": SECRET,
    }
    assert server.post("/v1/completions", body, headers={"x-request-id": "mine"}).status_code == 200
    taken, answered = both_lines(server, "mine")
    assert taken["message"] == "request taken"
    expected = {
        "level": "info",
        "actor": "api0",
        "samples": 4,
        "prompts": 2,
        "characters": 2 * (len(SECRET) + 4),
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 7,
        "stop_strings": 1,
        "logit_bias": 1,
        "stop_token_ids": 2,
    }
    assert taken.items() >= expected.items()
    assert answered.items() >= {"method": "POST", "path": "/v1/completions", "status": 200, "generation_tokens": 20}.items()
    assert answered["time_to_first_token"] <= answered["seconds"]
    assert SECRET not in server.run.log_path("api0").read_text()


def test_a_conversation_and_a_refusal(server: ApiServer) -> None:
    chat = {"messages": [{"role": "user", "content": SECRET}], "response_format": {"type": "json_object"}}
    server.post("/v1/chat/completions", chat, headers={"x-request-id": "chat"})
    taken, answered = both_lines(server, "chat")
    assert taken["conversation_bytes"] > len(SECRET)
    assert taken["has_form"] is True
    assert answered["status"] == 200
    server.post("/v1/chat/completions", {"messages": SECRET}, headers={"x-request-id": "wrong"})
    (refused,) = wait_until(lambda: lines(server, "wrong"), what="the refusal is logged")
    assert refused["status"] == 400
    server.get("/health", headers={"x-request-id": "probe"})
    server.post("/tokenize", {"prompt": "a"}, headers={"x-request-id": "behind"})
    (behind,) = lines(server, "behind")
    assert behind["path"] == "/tokenize"
    assert '"probe"' not in server.run.log_path("api0").read_text()
    assert SECRET not in server.run.log_path("api0").read_text()


def test_unsafe_id_is_logged_as_answered(server: ApiServer) -> None:
    for given in ("", "not safe 2", "x" * 200, "a/b"):
        answer = server.post("/v1/completions", {"prompt": 5}, headers={"x-request-id": given})
        assert answer.status_code == 400
        assert answer.headers["x-request-id"] != given
        (refused,) = lines(server, answer.headers["x-request-id"])
        assert refused.items() >= {"method": "POST", "path": "/v1/completions", "status": 400}.items()
