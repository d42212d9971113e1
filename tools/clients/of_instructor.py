"""Instructor over OpenAI's client, by tools, by JSON Schema and streamed."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel

from tools.clients.checks import QUESTION, Server, check, main


class Sum(BaseModel):
    """The sum."""

    sum: int


def ask(server: Server, mode: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    made = instructor.from_openai(client, mode=mode)
    return made.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Sum,
        temperature=0,
        max_retries=0,
    )


@check("tool call, forced (Mode.TOOLS)")
def by_tool(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.TOOLS).sum, int)


@check("structured output (Mode.JSON_SCHEMA)")
def by_schema(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.JSON_SCHEMA).sum, int)


@check("stream (create_partial)")
def stream(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    made: Any = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    pieces = list(
        made.chat.completions.create_partial(
            model=server.model, messages=[{"role": "user", "content": QUESTION}], response_model=Sum, temperature=0
        )
    )
    assert isinstance(pieces[-1].sum, int), pieces


@check("error: what the client raises")
def error(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    made: Any = instructor.from_openai(client)
    try:
        made.chat.completions.create(
            model="nobody", messages=[{"role": "user", "content": QUESTION}], response_model=Sum, max_retries=0
        )
    except Exception as raised:  # the client's own class, which it changed between versions
        assert "nobody" in str(raised), raised
    else:
        raise AssertionError("model nobody answered")


if __name__ == "__main__":
    main()
