"""Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic

from tools.clients.checks import ANSWER, CITY, QUESTION, Server, check, main

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "weather", "description": "Of a city.", "input_schema": CITY}]


def client_of(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)


def asked(server: Server) -> dict[str, Any]:
    return {"model": server.model, "messages": MESSAGES, "max_tokens": 64}


@check("models")
def models(server: Server) -> None:
    assert server.model in [model.id for model in client_of(server).models.list()]


@check("plain answer")
def plain(server: Server) -> None:
    answer = client_of(server).messages.create(**asked(server))
    assert ANSWER in answer.content[0].text, answer
    assert answer.stop_reason == "end_turn"


@check("stream")
def stream(server: Server) -> None:
    with client_of(server).messages.stream(**asked(server)) as events:
        pieces = list(events.text_stream)
        assert len(pieces) > 1, pieces
        assert ANSWER in "".join(pieces), pieces


@check("tool call, forced")
def tool(server: Server) -> None:
    answer = client_of(server).messages.create(**asked(server), tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input["city"] in ("Paris", "Oslo"), call
    assert answer.stop_reason == "tool_use"


@check("count_tokens")
def count(server: Server) -> None:
    assert client_of(server).messages.count_tokens(model=server.model, messages=MESSAGES).input_tokens > 3


@check("error: its class and shape")
def error(server: Server) -> None:
    try:
        client_of(server).messages.create(**asked(server), extra_body={"temperature": -1})
    except anthropic.BadRequestError as raised:
        body: Any = raised.body
        assert body["error"]["type"] == "invalid_request_error", body
    else:
        raise AssertionError("temperature -1 was taken")


if __name__ == "__main__":
    main()
