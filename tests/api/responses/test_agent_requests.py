"""Requests of the shapes that Codex and the AI SDK send to `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from api.responses.routes import DROPPED_HEADER
from api.responses.seal import seal
from engine.messages import ChatPrompt, Part
from tests.api.api_server import ApiServer

PARAMETERS = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
CLOSE: dict[str, Any] = {"type": "function", "name": "close_agent", "strict": False, "parameters": PARAMETERS}
EXEC: dict[str, Any] = {"type": "function", "name": "exec_command", "strict": False, "parameters": PARAMETERS}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [CLOSE]}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": PARAMETERS}
CODEX: dict[str, Any] = {
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [EXEC, NAMESPACE, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
    "text": {"verbosity": "low"},
}
USER = {"type": "message", "role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def silent(thinker: ApiServer) -> Iterator[None]:
    yield
    thinker.peer.script = []


def prompt_of(server: ApiServer, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Return the messages and functions of the prompt, and what the answer reports as dropped."""
    answer = server.post("/v1/responses", {"max_output_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    prompt = server.peer.submits()[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    tools = [tool["function"] for tool in orjson.loads(prompt.tools or b"[]")]
    return orjson.loads(prompt.messages), tools, answer.headers.get(DROPPED_HEADER, "")


def output_of(server: ApiServer, body: dict[str, Any], script: list[Part]) -> list[dict[str, Any]]:
    """Return the items of a stream, which equal those of its last event."""
    server.peer.script = script
    text = server.post("/v1/responses", {"input": "hi", **body, "stream": True}).text
    events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed", text
    done: list[dict[str, Any]] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return done


def test_codex_request_is_answered(thinker: ApiServer) -> None:
    messages, tools, dropped = prompt_of(thinker, CODEX)
    assert [tool["name"] for tool in tools] == ["exec_command", "close_agent"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert dropped == "web_search"


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview",
        "web_search_2025_08_26",
        "image_generation",
        "mcp",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "shell",
        "apply_patch",
    ],
)
def test_hosted_tool_is_dropped_and_named(thinker: ApiServer, kind: str) -> None:
    _, tools, dropped = prompt_of(thinker, {"input": "hi", "tools": [{"type": kind, "server_label": "x"}, EXEC]})
    assert [tool["name"] for tool in tools] == ["exec_command"]
    assert kind in dropped
    answer = thinker.post("/v1/responses", {"input": "hi", "tools": [{"type": kind}, EXEC], "tool_choice": {"type": kind}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("name", ["close_agent", "multi_agent_v1__close_agent"])
def test_call_carries_its_namespace(thinker: ApiServer, name: str) -> None:
    script = [Part("call", name, 0, "call_a"), Part("arguments", '{"target": "a"}', 0)]
    (call,) = output_of(thinker, {"tools": CODEX["tools"]}, script)
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "close_agent", "multi_agent_v1")
    assert call["arguments"] == '{"target": "a"}'
    thinker.peer.script = []
    output = {"type": "function_call_output", "call_id": "call_a", "output": "done"}
    messages, _, _ = prompt_of(thinker, {**CODEX, "input": [USER, call, output]})
    assert messages[1]["tool_calls"][0]["function"]["name"] == "close_agent"


def test_equal_names_of_namespaces_stay_apart(thinker: ApiServer) -> None:
    other = {**NAMESPACE, "name": "other"}
    script = [Part("call", "other__close_agent", 0, "call_a"), Part("arguments", "{}", 0)]
    (call,) = output_of(thinker, {"tools": [NAMESPACE, other, CLOSE]}, script)
    assert (call["name"], call["namespace"]) == ("close_agent", "other")
    thinker.peer.script = []
    messages, tools, _ = prompt_of(thinker, {"input": [USER, call], "tools": [NAMESPACE, other, CLOSE]})
    assert [tool["name"] for tool in tools] == ["multi_agent_v1__close_agent", "other__close_agent", "close_agent"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "other__close_agent"
    answer = thinker.post("/v1/responses", {"input": "hi", "tools": [CLOSE, CLOSE]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_tool_search_is_the_clients(thinker: ApiServer) -> None:
    deferred = {**NAMESPACE, "tools": [{**CLOSE, "defer_loading": True}]}
    script = [Part("call", "tool_search", 0, "call_a"), Part("arguments", '{"target": "agents"}', 0)]
    (call,) = output_of(thinker, {"tools": [SEARCH, deferred]}, script)
    assert (call["type"], call["execution"], call["arguments"]) == ("tool_search_call", "client", {"target": "agents"})
    thinker.peer.script = []
    _, tools, dropped = prompt_of(thinker, {"input": "hi", "tools": [SEARCH, deferred]})
    assert ([tool["name"] for tool in tools], dropped) == (["tool_search"], "")
    found = {"type": "tool_search_output", "call_id": call["call_id"], "execution": "client", "tools": [deferred]}
    messages, tools, _ = prompt_of(thinker, {"input": [USER, call, found], "tools": [SEARCH, deferred]})
    assert [tool["name"] for tool in tools] == ["tool_search", "close_agent"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"target": "agents"}
    assert "close_agent" in messages[2]["content"]
    _, tools, dropped = prompt_of(thinker, {"input": "hi", "tools": [{"type": "tool_search"}, deferred]})
    assert ([tool["name"] for tool in tools], dropped) == (["close_agent"], "tool_search")  # the server's search


def test_local_shell_call_is_returned_and_taken(thinker: ApiServer) -> None:
    script = [Part("call", "local_shell", 0, "call_a"), Part("arguments", '{"command": ["ls", "-l"]}', 0)]
    (call,) = output_of(thinker, {"tools": [{"type": "local_shell"}]}, script)
    assert (call["type"], call["action"]["type"], call["action"]["command"]) == ("local_shell_call", "exec", ["ls", "-l"])
    thinker.peer.script = []
    output = {"type": "local_shell_call_output", "call_id": "call_a", "output": "a.txt"}
    messages, _, _ = prompt_of(thinker, {"input": [USER, call, output], "tools": [{"type": "local_shell"}]})
    assert messages[1]["tool_calls"][0]["function"]["arguments"]["command"] == ["ls", "-l"]
    assert messages[2] == {"role": "tool", "content": "a.txt", "tool_call_id": "call_a"}


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        ({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "Q1"}}, "Q1"),
        ({"type": "file_search_call", "id": "f", "queries": ["Q2"], "results": [{"text": "found"}]}, "found"),
        ({"type": "code_interpreter_call", "id": "c", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}, "1+1"),
        ({"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "arguments": "{}", "output": "said"}, "said"),
        ({"type": "image_generation_call", "id": "i", "status": "completed", "result": "QUJD"}, "image_generation"),
        ({"type": "compaction", "encrypted_content": seal("so far")}, "so far"),
        ({"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "mail"}]}, "mail"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}], "encrypted_content": "gAAAA"}, "why"),
        ({"type": "program", "id": "p", "call_id": "c", "code": "print(1)", "fingerprint": "f"}, "print(1)"),
        ({"type": "program_output", "id": "q", "call_id": "c", "result": "one", "status": "completed"}, "one"),
        ({"type": "shell_call", "id": "s", "call_id": "c", "action": {"commands": ["ls"]}}, "commands"),
    ],
)
def test_foreign_item_becomes_text(thinker: ApiServer, item: dict[str, Any], shown: str) -> None:
    messages, _, _ = prompt_of(thinker, {"input": [USER, item, USER]})
    assert shown in orjson.dumps(messages).decode()


@pytest.mark.parametrize(
    ("call", "output"),
    [
        (
            {"type": "program", "id": "p", "code": "1", "fingerprint": "f"},
            {"type": "program_output", "id": "q", "result": "one"},
        ),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, {"type": "shell_call_output", "output": [{"stdout": "one"}]}),
    ],
)
def test_foreign_call_has_one_result(thinker: ApiServer, call: dict[str, Any], output: dict[str, Any]) -> None:
    messages, _, _ = prompt_of(thinker, {"input": [USER, call | {"call_id": "c"}, output | {"call_id": "c"}, USER]})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert "one" in messages[2]["content"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_elsewhere"},
        {"id": "rs_elsewhere"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    ],
)
def test_foreign_item_is_left_out_and_named(thinker: ApiServer, item: dict[str, Any]) -> None:
    messages, _, dropped = prompt_of(thinker, {"input": [USER, item, USER]})
    assert len(messages) == 2
    assert dropped in (item.get("type"), "item_reference")


def test_foreign_reasoning_without_a_summary_is_left_out(thinker: ApiServer) -> None:
    messages, _, _ = prompt_of(thinker, {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAA"}]})
    assert messages == [{"role": "user", "content": "hi"}]


def test_item_reference_is_a_stored_item(thinker: ApiServer) -> None:
    thinker.peer.script = [Part("content", "A stored answer.")]
    stored = thinker.post("/v1/responses", {"input": "hi"}).json()
    thinker.peer.script = []
    reference = {"type": "item_reference", "id": stored["output"][0]["id"]}
    messages, _, dropped = prompt_of(thinker, {"input": [USER, reference, USER]})
    assert (messages[1], dropped) == ({"role": "assistant", "content": "A stored answer."}, "")


def test_compaction_trigger_is_answered_with_a_summary(thinker: ApiServer) -> None:
    script = [Part("reasoning", "hm"), Part("content", "All "), Part("content", "done.")]
    (item,) = output_of(thinker, {"input": [USER, {"type": "compaction_trigger"}], "tools": [EXEC]}, script)
    assert item["type"] == "compaction"
    thinker.peer.script = []
    messages, _, _ = prompt_of(thinker, {"input": [item, USER]})
    assert "All done." in messages[0]["content"]


def test_compact_returns_messages_and_summary(thinker: ApiServer) -> None:
    thinker.peer.script = [Part("content", "All done.")]
    body = {"model": "tiny", "instructions": "i", "input": [USER, {"role": "assistant", "content": "yes"}], "tools": [EXEC]}
    answer = thinker.post("/v1/responses/compact", body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    user, summary = whole["output"]
    assert (whole["object"], user, summary["type"]) == ("response.compaction", USER, "compaction")
    assert whole["usage"]["output_tokens"] > 0
    thinker.peer.script = []
    messages, _, _ = prompt_of(thinker, {"input": [*whole["output"], USER]})
    assert "All done." in messages[1]["content"]


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_verbosity_is_taken(thinker: ApiServer, verbosity: str) -> None:
    prompt_of(thinker, {"input": "hi", "text": {"verbosity": verbosity}})
    assert thinker.post("/v1/responses", {"input": "hi", "text": {"verbosity": "loud"}}).status_code == 400
