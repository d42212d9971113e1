"""Ollama's client."""

from __future__ import annotations

import json
from typing import Any

import ollama

from tools.clients.checks import ANSWER, CITY, QUESTION, SUM, Server, check, main

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}]
GREEDY = {"temperature": 0}


def client_of(server: Server) -> Any:
    return ollama.Client(server.url)


@check("models")
def models(server: Server) -> None:
    assert any(server.model in model.model for model in client_of(server).list().models)


@check("plain answer")
def plain(server: Server) -> None:
    assert ANSWER in client_of(server).chat(server.model, MESSAGES, options=GREEDY).message.content


@check("stream")
def stream(server: Server) -> None:
    pieces = [
        piece.message.content or "" for piece in client_of(server).chat(server.model, MESSAGES, options=GREEDY, stream=True)
    ]
    assert len(pieces) > 1, pieces
    assert ANSWER in "".join(pieces), pieces


@check("generate")
def generate(server: Server) -> None:
    assert ANSWER in client_of(server).generate(server.model, QUESTION, options=GREEDY).response


@check("tools offered (the client cannot force a call)")
def tool(server: Server) -> None:
    answer = client_of(server).chat(server.model, MESSAGES, tools=TOOLS, options=GREEDY)
    assert answer.message.content or answer.message.tool_calls, answer


@check("structured output")
def structured(server: Server) -> None:
    answer = client_of(server).chat(server.model, MESSAGES, format=SUM, options=GREEDY)
    assert isinstance(json.loads(answer.message.content)["sum"], int), answer


@check("embeddings")
def embeddings(server: Server) -> None:
    one, other = ollama.Client(server.embedder_url).embed(server.embedder, ["the sun", "a fox"]).embeddings
    assert len(one) == len(other) > 0
    assert one != other


@check("error: its class and text")
def error(server: Server) -> None:
    try:
        client_of(server).chat("nobody", MESSAGES)
    except ollama.ResponseError as raised:
        assert raised.status_code == 404, raised
        assert "nobody" in raised.error, raised
    else:
        raise AssertionError("model nobody answered")


if __name__ == "__main__":
    main()
