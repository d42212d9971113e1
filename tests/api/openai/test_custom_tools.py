"""Custom tools of `/v1/chat/completions` with the real client, and what the engine is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest

from engine.messages import ChatPrompt, Part
from tests.api.api_server import ApiServer
from tests.requests import Submitted

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "d", "format": {"type": "text"}}}
PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
CALLS = [
    Part("content", "I go."),
    Part("call", "patch", 0, "call_a"),
    Part("arguments", '{"input": "a', 0),
    Part("arguments", '\\nb"}', 0),
    Part("call", "weather", 1, "call_b"),
    Part("arguments", '{"city": ', 1),
    Part("arguments", '"Rome"}', 1),
    Part("call", "patch", 2, "call_c"),
    Part("arguments", '{"input": "c"}', 2),
]


@pytest.fixture
def calling(thinker: ApiServer) -> Iterator[None]:
    thinker.peer.script = CALLS
    yield
    thinker.peer.script = []


def submit_of(server: ApiServer, **fields: Any) -> tuple[Submitted, ChatPrompt]:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    submit = server.peer.submits()[-1]
    assert isinstance(submit.prompt, ChatPrompt)
    return submit, submit.prompt


@pytest.mark.usefixtures("calling")
def test_call_of_a_custom_tool_has_its_input(responder: openai.OpenAI) -> None:
    answer = responder.chat.completions.create(model="tiny", messages=MESSAGES, tools=[CUSTOM, FUNCTION])  # type: ignore[list-item]
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I go."
    assert [call.to_dict() for call in choice.message.tool_calls or ()] == [
        {"id": "call_a", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
        {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"id": "call_c", "type": "custom", "custom": {"name": "patch", "input": "c"}},
    ]


@pytest.mark.usefixtures("calling")
def test_streamed_custom_call_equals_the_whole(thinker: ApiServer) -> None:
    body = {"messages": MESSAGES, "tools": [CUSTOM, FUNCTION], "stream": True}
    lines = thinker.post("/v1/chat/completions", body).text.splitlines()
    chunks = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": "a\nb"}},
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 1, "function": {"arguments": '{"city": '}},
        {"index": 1, "function": {"arguments": '"Rome"}'}},
        {"index": 2, "id": "call_c", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 2, "custom": {"input": "c"}},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(delta for delta in deltas)


def test_custom_tool_is_a_function_to_the_model(thinker: ApiServer) -> None:
    submit, prompt = submit_of(thinker, tools=[CUSTOM, FUNCTION])
    function = {"name": "patch", "description": "d", "parameters": PARAMETERS}
    assert orjson.loads(prompt.tools) == [{"type": "function", "function": function}, FUNCTION]
    assert submit.text.parsing is not None
    assert not submit.text.parsing.binds
    for syntax, definition, grammar in (("lark", 'start: "x"', 'start: "x"'), ("regex", "^a+$", "start: /a+/")):
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        submit, prompt = submit_of(thinker, tools=[{"type": "custom", "custom": {"name": "patch", "format": form}}])
        made = orjson.loads(prompt.tools)[0]["function"]
        assert made["parameters"]["properties"]["input"] == {"type": "string", "x-lark": grammar}
        assert submit.text.parsing is not None
        assert submit.text.parsing.binds


def test_history_of_custom_calls_reaches_the_prompt(thinker: ApiServer) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    _, prompt = submit_of(thinker, messages=turns)
    made = orjson.loads(prompt.messages)[1]["tool_calls"]
    assert made == [{"id": "c", "type": "function", "function": {"name": "patch", "arguments": {"input": "a\nb"}}}]
    for path in ("/tokenize", "/v1/chat/completions/render"):
        assert thinker.post(path, {"messages": turns, "tools": [CUSTOM]}).status_code == 200


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, ("named", ["patch"])),
        ("required", ("required", [])),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "custom", "custom": {"name": "patch"}},
                        {"type": "function", "function": {"name": "weather"}},
                    ],
                },
            },
            ("required", ["patch", "weather"]),
        ),
    ],
)
def test_choice_names_a_custom_tool(thinker: ApiServer, choice: Any, expected: tuple[str, list[str]]) -> None:
    parsing = submit_of(thinker, tools=[CUSTOM, FUNCTION], tool_choice=choice)[0].text.parsing
    assert parsing is not None
    assert (parsing.choice, parsing.names) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [FUNCTION, {"type": "custom", "custom": {}}]}, "tools[1].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "json"}}}]}, "tools[0].custom.format.type"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [CUSTOM, CUSTOM]}, "tools"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        (
            {
                "tools": [CUSTOM],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
            },
            "tool_choice.allowed_tools.tools[0].custom",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].custom"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_wrong_custom_tool_is_refused(thinker: ApiServer, fields: dict[str, Any], param: str) -> None:
    answer = thinker.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
