"""LangChain's ChatOpenAI and OpenAIEmbeddings (langchain-openai)."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tools.clients.checks import ANSWER, QUESTION, Server, check, main


class Sum(BaseModel):
    """The sum."""

    sum: int = Field(description="the sum")


def model_of(server: Server, **fields: Any) -> Any:
    return ChatOpenAI(
        model=server.model, base_url=f"{server.url}/v1", api_key="-", max_retries=0, **{"temperature": 0} | fields
    )


@check("plain answer")
def plain(server: Server) -> None:
    answer = model_of(server).invoke(QUESTION)
    assert ANSWER in answer.content, answer
    assert answer.usage_metadata["output_tokens"] > 0, answer


@check("stream")
def stream(server: Server) -> None:
    pieces = [str(piece.content) for piece in model_of(server).stream(QUESTION)]
    assert len(pieces) > 1, pieces
    assert ANSWER in "".join(pieces), pieces


@check("tool call, forced")
def tool(server: Server) -> None:
    @as_tool  # type: ignore[untyped-decorator]
    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    (call,) = model_of(server).bind_tools([double], tool_choice="double", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    assert call["name"] == "double", call
    assert isinstance(call["args"]["number"], int), call


@check("structured output, json_schema")
def structured(server: Server) -> None:
    answer = model_of(server).with_structured_output(Sum, method="json_schema").invoke(QUESTION)
    assert isinstance(answer.sum, int), answer


@check("structured output, function_calling")
def structured_by_call(server: Server) -> None:
    answer = model_of(server).with_structured_output(Sum, method="function_calling").invoke(QUESTION)
    assert isinstance(answer.sum, int), answer


@check("embeddings")
def embeddings(server: Server) -> None:
    embedder = OpenAIEmbeddings(
        model=server.embedder, base_url=f"{server.embedder_url}/v1", api_key="-", check_embedding_ctx_length=False
    )
    one, other = embedder.embed_documents(["the sun", "a fox"])
    assert len(one) == len(other) > 0
    assert one != other


@check("error: its class")
def error(server: Server) -> None:
    import openai

    try:
        model_of(server, temperature=-1).invoke(QUESTION)
    except openai.BadRequestError as raised:
        assert "temperature" in str(raised), raised
    else:
        raise AssertionError("temperature -1 was taken")


if __name__ == "__main__":
    main()
