"""Errors about a field name the field, its value and what it accepts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.anthropic.requests import MessagesRequest
from api.ollama.requests import OllamaGenerateRequest
from api.responses.requests import ResponsesRequest
from api.schemas.pooling import EmbeddingRequest
from api.schemas.requests import ChatRequest, CompletionRequest, Conversation, convert
from engine.errors import RequestError

CASES: list[tuple[type[msgspec.Struct], dict[str, Any], str]] = [
    (ChatRequest, {"temperature": 3}, "temperature: expected a number from 0 to 2, got 3"),
    (ChatRequest, {"n": "two"}, "n: expected an integer from 1 to 128, got 'two'"),
    (ChatRequest, {"stream": 3}, "stream: expected true or false, got 3"),
    (ChatRequest, {"stop": [""]}, "stop[0]: expected a string of 1 to 1024 characters, got ''"),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": 7}, "stop_token_ids: expected a list of at most 1024 entries, got 7"),
    (EmbeddingRequest, {"input": "a", "encoding_format": "hex"}, "encoding_format: expected 'base64' or 'float', got 'hex'"),
    (
        EmbeddingRequest,
        {"input": "a", "truncate_prompt_tokens": -2},
        "truncate_prompt_tokens: expected an integer from -1 to 2147483647, got -2",
    ),
    (ResponsesRequest, {"conversation": "conv_1"}, "conversation: not supported, got 'conv_1'; remove it"),
    (ResponsesRequest, {"conversation": {"id": "c"}}, "conversation: not supported, got an object of 1; remove it"),
    (ResponsesRequest, {"prompt": {"id": "p"}}, "prompt: not supported, got an object of 1; remove it"),
    (ResponsesRequest, {"context_management": [{}]}, "context_management: not supported, got an array of 1; remove it"),
    (OllamaGenerateRequest, {"context": [1]}, "context: not supported, got an array of 1; remove it"),
    (
        MessagesRequest,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "mcp_servers": [{}]},
        "mcp_servers: not supp",
    ),
    (Conversation, {"messages": 5}, "messages: expected a list"),
]


@pytest.mark.parametrize(("type_", "fields", "text"), CASES)
def test_error_names_value_and_what_is_accepted(type_: type[msgspec.Struct], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as raised:
        convert(fields, type_)
    assert raised.value.message.startswith(text), raised.value.message


def test_error_lists_the_kinds_of_a_union() -> None:
    with pytest.raises(RequestError) as raised:
        convert({"input": "a", "tool_choice": "perhaps"}, ResponsesRequest)
    assert "expected " in raised.value.message
    assert "'auto'" in raised.value.message
    assert raised.value.message.endswith("got 'perhaps'")
