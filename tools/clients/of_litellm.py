"""LiteLLM, as a library: through OpenAI's API, Ollama's and Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tools.clients.checks import ANSWER, CITY, QUESTION, SUM, Server, check, main

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}]


def ask(server: Server, **fields: Any) -> Any:
    defaults = {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "temperature": 0}
    return litellm.completion(messages=[{"role": "user", "content": QUESTION}], api_key="-", max_retries=0, **defaults | fields)


@check("plain answer")
def plain(server: Server) -> None:
    assert ANSWER in ask(server).choices[0].message.content


@check("plain answer, as hosted_vllm")
def hosted_vllm(server: Server) -> None:
    assert ANSWER in ask(server, model=f"hosted_vllm/{server.model}").choices[0].message.content


@check("plain answer, as ollama_chat")
def ollama_chat(server: Server) -> None:
    answer = ask(server, model=f"ollama_chat/{server.model}", api_base=server.url)
    assert ANSWER in answer.choices[0].message.content, answer


@check("plain answer, as anthropic")
def anthropic(server: Server) -> None:
    answer = ask(server, model=f"anthropic/{server.model}", api_base=server.url, max_tokens=64)
    assert ANSWER in answer.choices[0].message.content, answer


@check("stream")
def stream(server: Server) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True)]
    assert len(pieces) > 1, pieces
    assert ANSWER in "".join(pieces), pieces


@check("tool call, forced")
def tool(server: Server) -> None:
    (call,) = ask(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo"), call


@check("structured output")
def structured(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}
    assert isinstance(json.loads(ask(server, response_format=form).choices[0].message.content)["sum"], int)


@check("embeddings")
def embeddings(server: Server) -> None:
    answer = litellm.embedding(
        model=f"openai/{server.embedder}", input=["the sun", "a fox"], api_base=f"{server.embedder_url}/v1", api_key="-"
    )
    one, other = (item["embedding"] for item in answer.data)
    assert len(one) == len(other) > 0
    assert one != other


@check("error: its class")
def error(server: Server) -> None:
    try:
        ask(server, temperature=-1)
    except litellm.BadRequestError as raised:
        assert "temperature" in str(raised), raised
    else:
        raise AssertionError("temperature -1 was taken")


if __name__ == "__main__":
    main()
