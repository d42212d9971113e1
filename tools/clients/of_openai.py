"""OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai

from tools.clients.checks import ANSWER, CITY, QUESTION, SUM, Server, check, main

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}]


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


@check("models")
def models(server: Server) -> None:
    assert server.model in [model.id for model in client_of(server).models.list()]


@check("plain answer")
def plain(server: Server) -> None:
    answer = client_of(server).chat.completions.create(model=server.model, messages=MESSAGES, temperature=0)
    assert ANSWER in answer.choices[0].message.content, answer


@check("stream")
def stream(server: Server) -> None:
    client = client_of(server)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=0, stream=True)
        if chunk.choices
    ]
    assert len(pieces) > 1, pieces
    assert ANSWER in "".join(pieces), pieces


@check("tool call, forced")
def tool(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather", call
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo"), call


@check("structured output")
def structured(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["sum"], int), answer


@check("structured output, parsed by the client")
def parsed(server: Server) -> None:
    from pydantic import BaseModel

    class Sum(BaseModel):
        sum: int

    client = client_of(server)
    answer = client.chat.completions.parse(model=server.model, messages=MESSAGES, temperature=0, response_format=Sum)
    assert isinstance(answer.choices[0].message.parsed.sum, int), answer


@check("responses")
def responses(server: Server) -> None:
    answer = client_of(server).responses.create(model=server.model, input=QUESTION, temperature=0)
    assert ANSWER in answer.output_text, answer


@check("responses, stream")
def responses_stream(server: Server) -> None:
    with client_of(server).responses.stream(model=server.model, input=QUESTION, temperature=0) as events:
        kinds = {event.type for event in events}
        assert "response.output_text.delta" in kinds, kinds
        assert ANSWER in events.get_final_response().output_text


@check("embeddings")
def embeddings(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.embedder_url}/v1", api_key="-", max_retries=0)
    answer = client.embeddings.create(model=server.embedder, input=["the sun", "a fox"])
    one, other = (item.embedding for item in answer.data)
    assert len(one) == len(other) > 0
    assert one != other


@check("error: its class, code and parameter")
def error(server: Server) -> None:
    try:
        client_of(server).chat.completions.create(model=server.model, messages=MESSAGES, temperature=-1)
    except openai.BadRequestError as raised:
        assert (raised.status_code, raised.param) == (400, "temperature"), raised.body
    else:
        raise AssertionError("temperature -1 was taken")


@check("error: a model that is not there")
def no_model(server: Server) -> None:
    try:
        client_of(server).chat.completions.create(model="nobody", messages=MESSAGES)
    except openai.NotFoundError as raised:
        assert "nobody" in str(raised), raised
    else:
        raise AssertionError("model nobody answered")


if __name__ == "__main__":
    main()
