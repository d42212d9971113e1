"""`/v1/responses` with the real client, and what the engine is asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from api.responses.items import digest
from api.responses.routes import MAX_ITEMS
from engine.messages import ChatPrompt, Part
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.requests import Submitted

FUNCTION: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
CALLS = [
    Part("reasoning", "Two "),
    Part("reasoning", "calls."),
    Part("content", "I "),
    Part("content", "go."),
    Part("call", "weather", 0, "call_a"),
    Part("arguments", '{"city": ', 0),
    Part("arguments", '"Rome"}', 0),
    Part("call", "patch", 1, "call_b"),
    Part("arguments", '{"input": "a\\nb"}', 1),
]


@pytest.fixture
def calling(thinker: ApiServer) -> Iterator[None]:
    thinker.peer.script = CALLS
    yield
    thinker.peer.script = []


def ask(server: ApiServer, body: dict[str, Any]) -> httpx.Response:
    return server.post("/v1/responses", {"max_output_tokens": 2, "input": "hi", **body})


def submit_of(server: ApiServer, body: dict[str, Any]) -> tuple[Submitted, ChatPrompt, list[dict[str, Any]]]:
    """Return what reaches the engine for `body`."""
    answer = ask(server, body)
    assert answer.status_code == 200, answer.text
    submit = server.peer.submits()[-1]
    assert isinstance(submit.prompt, ChatPrompt)
    return submit, submit.prompt, orjson.loads(submit.prompt.messages)


def events_of(server: ApiServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = ask(server, {**body, "stream": True}).text
    return [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_whole(responder: openai.OpenAI) -> None:
    response = responder.responses.create(
        model="tiny",
        input="hi",
        max_output_tokens=20,
        metadata={"a": "b"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert (response.object, response.status, response.model, response.output_text) == (
        "response",
        "incomplete",
        "tiny",
        said_text(20),
    )
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.max_output_tokens, response.temperature) == ({"a": "b"}, 20, 1.0)
    (message,) = response.output
    assert message.type == "message"
    (text,) = message.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in text.logprobs).decode("utf-8", "replace") == said_text(20)
    assert [len(entry.top_logprobs) for entry in text.logprobs] == [2] * 20
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (6, 4, 20)


@pytest.mark.usefixtures("calling")
def test_a_stream_has_the_items_of_the_whole(thinker: ApiServer, responder: openai.OpenAI) -> None:
    tools: Any = [FUNCTION, CUSTOM]
    body = {"tools": tools, "include": ["reasoning.encrypted_content"], "max_output_tokens": 50}
    events = events_of(thinker, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"]) == ("response.completed", "completed")
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    reasoning, message, call, custom = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Two calls."}]
    assert message["content"][0]["text"] == "I go."
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_a", "weather", '{"city": "Rome"}')
    assert (custom["call_id"], custom["name"], custom["input"]) == ("call_b", "patch", "a\nb")
    for item in final["output"]:
        begun = next(
            event for event in events if event["type"] == "response.output_item.added" and event["item"]["id"] == item["id"]
        )
        assert final["output"][begun["output_index"]] == item
        deltas = [event["delta"] for event in events if event["type"].endswith(".delta") and event["item_id"] == item["id"]]
        assert "".join(deltas) == item.get("arguments", item.get("input")) or "".join(deltas) == item["content"][0]["text"]
    with responder.responses.stream(model="tiny", input="hi", tools=tools) as stream:
        seen = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert seen[:2] == ["response.created", "response.in_progress"]
    assert streamed.output_text == "I go."
    whole = responder.responses.create(model="tiny", input="hi", tools=tools, include=["reasoning.encrypted_content"])
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    for one, other in zip(final["output"], whole.output, strict=True):
        assert {**one, "id": 0} == {**other.to_dict(), "id": 0}
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 2


def test_logprobs_cover_only_the_content(thinker: ApiServer, responder: openai.OpenAI) -> None:
    """Thinking, markers and calls have no log-probabilities there."""
    nothing = Part("", "")
    thinker.peer.script = [
        Part("reasoning", "hm", begin=0, end=1),
        nothing,  # the end of thinking
        nothing,  # held back
        Part("content", "I ", begin=2, end=4),
        Part("content", "go"),
        Part("call", "weather", 0, "call_a", begin=5, end=6),
        Part("arguments", "{}", 0, begin=6, end=6),
        nothing,
        Part("content", "now", begin=8, end=9),
        nothing,  # the end
    ]
    try:
        body = {"include": ["message.output_text.logprobs"], "tools": [FUNCTION], "max_output_tokens": 50}
        events = events_of(thinker, body)
        whole = ask(thinker, body).json()
    finally:
        thinker.peer.script = []
    expected = [[2, 3, 4], [8]]
    for response in (events[-1]["response"], whole):
        messages = [item["content"][0] for item in response["output"] if item["type"] == "message"]
        assert [message["text"] for message in messages] == ["I go", "now"]
        assert [[entry["bytes"][0] for entry in message["logprobs"]] for message in messages] == expected
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["bytes"][0] for entry in event["logprobs"]] for event in deltas] == [[2, 3], [4], [8]]
    begun = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert [part["logprobs"] for part in begun if part["type"] == "output_text"] == [[], []]


def test_items_become_turns(thinker: ApiServer) -> None:
    sealed = "VHdvIGNhbGxzLg=="
    items = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    body = {
        "instructions": "be",
        "input": items,
        "tools": [FUNCTION, CUSTOM],
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    _, prompt, messages = submit_of(thinker, body)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"id": "2", "type": "function", "function": {"name": "patch", "arguments": {"input": "x"}}},
    ]
    assert messages == [
        {"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "Two calls.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "ok", "tool_call_id": "2"},
    ]
    function, custom = orjson.loads(prompt.tools)
    assert function == {"type": "function", "function": {"name": "weather", "parameters": FUNCTION["parameters"]}}
    assert custom["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert orjson.loads(prompt.chat_template_kwargs)["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"syntax": "lark", "definition": 'start: "a"'}, 'start: "a"'),
        ({"syntax": "regex", "definition": "^a/b\\/\\n$"}, "start: /a\\/b\\/\\n/"),
    ],
)
def test_formats_of_custom_tools(thinker: ApiServer, given: dict[str, str], grammar: str) -> None:
    """Formats are enforced; the grammars themselves are tested beside the parsers."""
    tool = CUSTOM | {"format": {"type": "grammar", **given}}
    (custom,) = orjson.loads(submit_of(thinker, {"tools": [tool]})[1].tools)
    assert custom["function"]["strict"] is True
    assert custom["function"]["parameters"]["properties"]["input"]["x-lark"] == grammar


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ("auto", [])),
        ("required", ("required", [])),
        ({"type": "function", "name": "weather"}, ("named", ["weather"])),
        ({"type": "custom", "name": "patch"}, ("named", ["patch"])),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            ("required", ["patch"]),
        ),
    ],
)
def test_tool_choice(thinker: ApiServer, choice: Any, expected: tuple[str, list[str]]) -> None:
    parsing = submit_of(thinker, {"tools": [FUNCTION, CUSTOM], "tool_choice": choice, "parallel_tool_calls": False})[
        0
    ].text.parsing
    assert parsing is not None
    assert ((parsing.choice, parsing.names), parsing.is_parallel) == (expected, False)


@pytest.mark.usefixtures("calling")
def test_stored_response_is_continued(thinker: ApiServer, responder: openai.OpenAI) -> None:
    """A stored response can be continued, but its instructions are not inherited."""
    tools: Any = [FUNCTION, CUSTOM]
    first = responder.responses.create(model="tiny", input="hi", tools=tools, instructions="be brief")
    assert responder.responses.retrieve(first.id).to_dict() == first.to_dict()
    outputs: Any = [{"type": "function_call_output", "call_id": "call_a", "output": "sun"}]
    second = responder.responses.create(model="tiny", input=outputs, previous_response_id=first.id)
    submit = thinker.peer.submits()[-1]
    assert isinstance(submit.prompt, ChatPrompt)
    messages = orjson.loads(submit.prompt.messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("I go.", "Two calls.")
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_a", "call_b"]
    third = responder.responses.create(model="tiny", input="and?", previous_response_id=second.id, store=False)
    submit = thinker.peer.submits()[-1]
    assert isinstance(submit.prompt, ChatPrompt)
    assert len(orjson.loads(submit.prompt.messages)) == 5
    responder.responses.delete(first.id)
    for gone in (first.id, third.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError):
            responder.responses.retrieve(gone)
    with pytest.raises(openai.NotFoundError):
        responder.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as raised:
        responder.responses.create(model="tiny", input="and?", previous_response_id=first.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_response_id_is_not_derivable_from_logs(thinker: ApiServer) -> None:
    """Request ids are in logs and spans that others may read; a response id gives access to the response."""
    answers = [thinker.post("/v1/responses", {"input": "hi"}) for _ in range(2)]
    for answer in answers:
        request_id = answer.headers["x-request-id"]
        assert answer.json()["id"] not in (f"resp_{request_id}", f"resp_{digest(request_id)}")
    assert len({answer.json()["id"] for answer in answers}) == 2


def test_input_tokens(responder: openai.OpenAI) -> None:
    assert responder.responses.input_tokens.count(model="tiny", input="hi").input_tokens == len(b'["hi"]')
    counted = responder.responses.input_tokens.count(model="tiny", input="hi", instructions="x")
    assert counted.input_tokens == len(b'["x","hi"]')


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}] * (MAX_ITEMS + 1)}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, "input[0]"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "web_serch_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"include": ["nothing"]}, "include[0]"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_mistakes(thinker: ApiServer, body: dict[str, Any], param: str) -> None:
    answer = ask(thinker, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_a_stream_that_fails(thinker: ApiServer) -> None:
    """The engine goes away while it answers: the response is complete, has status failed, and can be retrieved."""
    with thinker.paced(3):
        body = {"input": "hi", "stream": True, "max_output_tokens": 9}
        with httpx.stream("POST", f"{thinker.url}/v1/responses", json=body, headers={"x-request-id": "cut"}) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("event: response.output_text.delta"):
                pass
            assert thinker.order("abort", {"request_id": "cut"}).status_code == 200
            datas = [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert datas[-1]["type"] == "response.failed"
    response = datas[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["status"] == "incomplete"
    assert thinker.get(f"/v1/responses/{response['id']}").json() == response


def test_a_picture_of_the_assistant(thinker: ApiServer) -> None:
    items = [{"role": "assistant", "content": [{"type": "input_image", "image_url": ""}]}]
    assert ask(thinker, {"input": items}).json()["error"]["param"] == "input[0]"
