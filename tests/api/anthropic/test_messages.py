"""`/v1/messages` with the real client, and what the engine is asked for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from engine.messages import ChatPrompt, Part
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.requests import Submitted
from tests.waiting import wait_until

if TYPE_CHECKING:
    import anthropic  # else by who uses it: every process that collects tests would take two seconds longer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {}}}}
CALLS = [
    Part("reasoning", "Two "),
    Part("reasoning", "cities."),
    Part("content", "I "),
    Part("content", "look."),
    Part("call", "weather", 0, "call_a"),
    Part("arguments", '{"city": ', 0),
    Part("arguments", '"Rome"}', 0),
    Part("call", "weather", 1, "call_b"),
    Part("arguments", '{"city":"Bonn"}', 1),
]
BLOCKS = [
    {"type": "thinking", "thinking": "Two cities."},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}},
    {"type": "tool_use", "id": "call_b", "name": "weather", "input": {"city": "Bonn"}},
]


@pytest.fixture(scope="module")
def claude(thinker: ApiServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as made:
        yield made


def ask(server: ApiServer, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return server.post(path, {"max_tokens": 2, "messages": MESSAGES, **body})


def submit_of(server: ApiServer, body: dict[str, Any]) -> tuple[Submitted, ChatPrompt, list[dict[str, Any]]]:
    """Return what reaches the engine for `body`."""
    answer = ask(server, body)
    assert answer.status_code == 200, answer.text
    submit = server.peer.submits()[-1]
    assert isinstance(submit.prompt, ChatPrompt)
    return submit, submit.prompt, orjson.loads(submit.prompt.messages)


def test_whole(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="tiny", max_tokens=20, messages=MESSAGES)
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", "tiny", "max_tokens")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": said_text(20)}]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 4, 0)
    assert usage.output_tokens == 20
    assert message._request_id


def test_stream_equals_whole(thinker: ApiServer, claude: anthropic.Anthropic) -> None:
    thinker.peer.script = CALLS
    try:
        tools: Any = [TOOL]
        whole = claude.messages.create(model="tiny", max_tokens=50, messages=MESSAGES, tools=tools)
        with claude.messages.stream(model="tiny", max_tokens=50, messages=MESSAGES, tools=tools) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_message()
    finally:
        thinker.peer.script = []
    assert [{k: v for k, v in block.to_dict().items() if k != "signature"} for block in whole.content] == BLOCKS
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(CALLS)
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == 2
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"


def test_events(thinker: ApiServer) -> None:
    """Events come in order with their fields, blocks do not overlap, and silence is filled with pings."""
    with thinker.paced(0):
        body = {"max_tokens": 9, "messages": MESSAGES, "stream": True}
        with httpx.stream("POST", f"{thinker.url}/v1/messages", json=body) as answer:
            lines = answer.iter_lines()
            assert [next(lines), next(lines)] == ["event: ping", 'data: {"type":"ping"}']
            thinker.peer.credits = None
            datas = [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = [data["type"] for data in datas if data["type"] not in ("ping", "content_block_delta")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "ping" in [data["type"] for data in datas]
    start = next(data["message"] for data in datas if data["type"] == "message_start")
    assert (start["content"], start["stop_reason"], start["usage"]["cache_read_input_tokens"]) == ([], None, 4)
    deltas = [data for data in datas if data["type"] == "content_block_delta"]
    assert "".join(data["delta"]["text"] for data in deltas) == said_text(9)
    assert {data["index"] for data in deltas} == {0}
    end = next(data for data in datas if data["type"] == "message_delta")
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 9


def test_answer_complete_in_one_piece_begins_empty(thinker: ApiServer) -> None:
    body = {"max_tokens": 1, "messages": MESSAGES, "stream": True}
    answer = httpx.post(f"{thinker.url}/v1/messages", json=body)
    datas = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    start = next(data["message"] for data in datas if data["type"] == "message_start")
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert [data["delta"]["text"] for data in datas if data["type"] == "content_block_delta"] == [said_text(1)]


def test_omitted_thinking_has_no_text(thinker: ApiServer) -> None:
    thinker.peer.script = CALLS[:3]
    try:
        answer = ask(thinker, {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 9}).json()
    finally:
        thinker.peer.script = []
    thinking, text = answer["content"]
    assert (thinking["thinking"], text["text"], answer["stop_reason"]) == ("", "I ", "end_turn")
    assert thinking["signature"]


def test_conversation(thinker: ApiServer) -> None:
    """All blocks reach the engine, in the order of chat."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body: dict[str, Any] = {
        "system": [
            billing,
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "b"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}], "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "system", "content": "now"},
            {"role": "user", "content": "go"},
        ],
        "tools": [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
    }
    _, prompt, messages = submit_of(thinker, body)
    text = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert messages == [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": part} for part in ("a", "T", "b")]},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "The tool failed:"}, {"type": "text", "text": "sun"}],
            "tool_call_id": "1",
        },
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "now"},
        {"role": "user", "content": "go"},
    ]
    function = {"name": "weather", "description": "d", "parameters": TOOL["input_schema"]}
    assert orjson.loads(prompt.tools) == [{"type": "function", "function": function}]
    assert submit_of(thinker, {"system": f"{billing['text']}\nbe"})[2][0] == {"role": "system", "content": "be"}
    refused = ask(thinker, {"messages": [{"role": "user", "content": [picture]}]})
    assert refused.json()["error"]["message"].startswith("messages[0]: this model accepts only text")


def test_begun_turn_is_continued(thinker: ApiServer) -> None:
    _, prompt, messages = submit_of(thinker, {"messages": [*MESSAGES, {"role": "assistant", "content": "The answer is"}]})
    assert messages[-1] == {"role": "assistant", "content": "The answer is"}
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, ("auto", []), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", []), False),
        ({"type": "tool", "name": "weather"}, ("named", ["weather"]), True),
    ],
)
def test_tool_choice(thinker: ApiServer, choice: dict[str, Any], expected: tuple[str, list[str]], is_parallel: bool) -> None:
    parsing = submit_of(thinker, {"tools": [TOOL], "tool_choice": choice})[0].text.parsing
    assert parsing is not None
    assert ((parsing.choice, parsing.names), parsing.is_parallel) == (expected, is_parallel)


def test_parameters(thinker: ApiServer) -> None:
    body = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["x"], "max_tokens": 10**6, "tools": [TOOL]}
    thinker.peer.script = CALLS[2:3]
    try:
        submit, prompt, _ = submit_of(
            thinker, body | {"thinking": {"type": "enabled", "budget_tokens": 7}, "tool_choice": {"type": "none"}}
        )
        switched_off = submit_of(thinker, {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}})[1]
    finally:
        thinker.peer.script = []
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 3, 0.9, 10**6)
    assert (submit.text.stop, submit.text.is_max_tokens_cut, prompt.tools) == (["x"], True, b"")
    assert submit.text.parsing is not None
    assert submit.text.parsing.thinking_token_budget == 7
    assert orjson.loads(prompt.chat_template_kwargs)["enable_thinking"] is True
    kwargs = orjson.loads(switched_off.chat_template_kwargs)
    assert (kwargs["enable_thinking"], kwargs["reasoning_effort"]) == (False, "xhigh")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_used"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "tool_result",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tools": [TOOL | {"defer_loading": True}], "tool_choice": {"type": "tool", "name": "weather"}}, "has defer_loading"),
        ({"tools": [TOOL | {"defer_loading": True}], "tool_choice": {"type": "any"}}, "all tools have defer_loading"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBE"}}]}]},
            "send their text",
        ),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
    ],
)
def test_mistakes(thinker: ApiServer, body: dict[str, Any], says: str) -> None:
    answer = ask(thinker, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert says in error["error"]["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {}}}}
DEFERRED = TOOL | {"defer_loading": True}
USED = {"type": "tool_use", "id": "call_a", "name": "ToolSearch", "input": {"query": "weather"}}
FOUND = {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "tool_reference", "tool_name": "weather"}]}


def test_deferred_tool_waits_for_its_reference(thinker: ApiServer) -> None:
    body: dict[str, Any] = {"tools": [SEARCH, DEFERRED]}
    before = submit_of(thinker, body)[1]
    assert [tool["function"]["name"] for tool in orjson.loads(before.tools)] == ["ToolSearch"]
    searched = [*MESSAGES, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [FOUND]}]
    _, after, messages = submit_of(thinker, body | {"messages": searched})
    assert [tool["function"]["name"] for tool in orjson.loads(after.tools)] == ["ToolSearch", "weather"]
    assert messages[-1] == {"role": "tool", "content": "Tool found: weather", "tool_call_id": "call_a"}
    assert submit_of(thinker, {"tools": [DEFERRED]})[1].tools == b""
    counted = ask(thinker, {"messages": searched, **body}, "/v1/messages/count_tokens")
    assert counted.status_code == 200, counted.text


def test_omitted_thinking_is_filled_with_pings(thinker: ApiServer) -> None:
    thinker.peer.script = [Part("reasoning", "hm ")] * 20 + [Part("content", "So.")]
    thinking = {"type": "adaptive", "display": "omitted"}
    body = {"model": "tiny", "messages": MESSAGES, "thinking": thinking, "stream": True, "max_tokens": 100}
    try:
        with thinker.paced(5), httpx.stream("POST", f"{thinker.url}/v1/messages", json=body, timeout=30) as answer:
            pings = (line for line in answer.iter_lines() if line == "event: ping")
            assert len(list(itertools.islice(pings, 4))) == 4
    finally:
        thinker.peer.script = []


def test_effort_alone_does_not_turn_thinking_on(thinker: ApiServer) -> None:
    kwargs = orjson.loads(submit_of(thinker, {"output_config": {"effort": "medium"}})[1].chat_template_kwargs)
    assert kwargs == {"reasoning_effort": "medium"}


def test_results_of_foreign_server_tools_are_shown(thinker: ApiServer) -> None:
    hit = {"type": "web_search_result", "title": "Rain", "url": "http://x", "encrypted_content": "EqgfCioI"}
    turn = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [hit]},
        {"type": "text", "text": "It rains."},
    ]
    sent = [*MESSAGES, {"role": "assistant", "content": turn}, *MESSAGES]
    _, _, messages = submit_of(thinker, {"messages": sent})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "web_search", "arguments": {"query": "q"}}
    assert messages[2] == {"role": "tool", "content": '{"title":"Rain","url":"http://x"}', "tool_call_id": "srv_1"}
    assert messages[3]["content"] == "It rains."


def test_foreign_tool_search_adds_its_tools(thinker: ApiServer) -> None:
    found = {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference", "tool_name": "weather"}]}
    turn = [
        {"type": "server_tool_use", "id": "srv_1", "name": "tool_search_tool_regex", "input": {"query": "w"}},
        {"type": "tool_search_tool_result", "tool_use_id": "srv_1", "content": found},
    ]
    sent = [*MESSAGES, {"role": "assistant", "content": turn}, *MESSAGES]
    _, prompt, _ = submit_of(thinker, {"messages": sent, "tools": [SEARCH, DEFERRED]})
    assert [tool["function"]["name"] for tool in orjson.loads(prompt.tools)] == ["ToolSearch", "weather"]


def test_failed_tool_result_is_marked(thinker: ApiServer) -> None:
    used = {"role": "assistant", "content": [USED]}
    result = {"type": "tool_result", "tool_use_id": "call_a", "content": "no route", "is_error": True}
    _, _, messages = submit_of(thinker, {"messages": [*MESSAGES, used, {"role": "user", "content": [result]}]})
    shown = orjson.dumps(messages[-1]["content"]).decode()
    assert "failed" in shown
    assert "no route" in shown


def test_newer_blocks_reach_the_prompt(thinker: ApiServer) -> None:
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "So far."}]}
    used = {"role": "assistant", "content": [USED]}
    state = {"type": "browser_state", "tabs": [{"title": "News", "url": "http://x"}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_a", "content": [state]}]}
    _, prompt, messages = submit_of(
        thinker, {"messages": [*MESSAGES, summary, *MESSAGES, used, result], "thinking": {"type": "between_tools"}}
    )
    assert messages[1]["content"].endswith("So far.")
    assert "News" in messages[-1]["content"]
    assert orjson.loads(prompt.chat_template_kwargs)["enable_thinking"] is True


def test_reference_of_a_user_names_its_tool(thinker: ApiServer) -> None:
    reference = [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "weather"}]}]
    _, prompt, messages = submit_of(thinker, {"messages": reference, "tools": [DEFERRED]})
    assert messages == [{"role": "user", "content": "Tool found: weather"}]
    assert [tool["function"]["name"] for tool in orjson.loads(prompt.tools)] == ["weather"]


def test_examples_of_inputs_reach_the_prompt(thinker: ApiServer) -> None:
    _, prompt, _ = submit_of(thinker, {"tools": [TOOL | {"input_examples": [{"city": "Rome"}]}]})
    assert orjson.loads(prompt.tools)[0]["function"]["parameters"]["examples"] == [{"city": "Rome"}]


def test_empty_system_block_is_no_message(thinker: ApiServer) -> None:
    _, _, messages = submit_of(thinker, {"system": [{"type": "text", "text": ""}]})
    assert messages == MESSAGES


@pytest.mark.parametrize("kind", ["clear_tool_uses_20250919", "clear_thinking_20251015"])
def test_context_edit_is_taken(thinker: ApiServer, kind: str) -> None:
    edit = {"type": kind, "trigger": {"type": "input_tokens", "value": 9}, "keep": {"type": "tool_uses", "value": 3}}
    assert ask(thinker, {"context_management": {"edits": [edit]}}).status_code == 200


def test_errors(claude: anthropic.Anthropic, thinker: ApiServer) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        claude.messages.create(model="nobody", max_tokens=2, messages=MESSAGES)
    with pytest.raises(anthropic.NotFoundError, match="not found"):
        claude.get("/v1/messages/batches", cast_to=object)
    with thinker.paced(2), pytest.raises(anthropic.APIStatusError, match="operator"):  # noqa: PT012
        headers = {"x-request-id": "cut"}
        with claude.messages.stream(model="tiny", max_tokens=9, messages=MESSAGES, extra_headers=headers) as stream:
            next(iter(stream))
            wait_until(lambda: thinker.order("abort", {"request_id": "cut"}).status_code == 200, what="aborted")
            stream.until_done()


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens == len(b'["hi"]')
    system = claude.messages.count_tokens(model="tiny", messages=MESSAGES, system="x", tools=[TOOL])  # type: ignore[list-item]
    assert system.input_tokens == len(b'["x","hi"]')


def test_models(claude: anthropic.Anthropic) -> None:
    import anthropic

    page = claude.models.list(limit=1)
    assert [(model.id, model.type, model.max_tokens) for model in page.data] == [("tiny", "model", 256)]
    assert [model.id for model in page] == ["tiny", "alias"]
    assert claude.models.retrieve("alias").display_name == "alias"
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody")
