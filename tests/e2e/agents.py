"""Claude Code, Codex, OpenCode and Open WebUI as clients: how each reads an answer and builds its next request.

Their first bodies are in `clients/`, with the turns of a conversation: the tool to call, its arguments, and its result.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import orjson

from tests.paths import REPOSITORY

Json = dict[str, Any]
Call = tuple[str, str, Json]  # id, tool, arguments
RECORDED: dict[str, Json] = {
    file.stem: json.loads(file.read_text()) for file in sorted((REPOSITORY / "tests/e2e/clients").glob("*.json"))
}


class Agent(Protocol):
    def call(self, events: list[Json]) -> Call:
        """Return the tool call of an answer."""

    def prompt(self, events: list[Json]) -> tuple[int, int | None]:
        """Return the number of prompt tokens, and of cached ones where the answer has it."""

    def next_body(self, body: Json, events: list[Json], result: str) -> Json:
        """Return the request that follows an answer to `body`."""


class ClaudeCode:
    def call(self, events: list[Json]) -> Call:
        (block,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        return block["id"], block["name"], orjson.loads("".join(pieces))

    def prompt(self, events: list[Json]) -> tuple[int, int | None]:
        usage = events[-2]["usage"]
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]

    def next_body(self, body: Json, events: list[Json], result: str) -> Json:
        """Return the next request; cache marks and the note to its own server differ each time."""
        (_, *system), messages = body["system"], json.loads(json.dumps(body["messages"]))
        del messages[-1]["content"][-1]["cache_control"]
        call_id, name, arguments = self.call(events)
        use = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        mark = {"cache_control": {"type": "ephemeral"}}
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result, **mark}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
        note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0.76.9d2; cc_entrypoint=cli; cch=0aaa9;"}
        return body | {"system": [note, *system], "messages": messages}


class Codex:
    def call(self, events: list[Json]) -> Call:
        (item,) = events[-1]["response"]["output"]
        return item["call_id"], item["name"], orjson.loads(item["arguments"])

    def prompt(self, events: list[Json]) -> tuple[int, int | None]:
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def next_body(self, body: Json, events: list[Json], result: str) -> Json:
        items = [{name: item[name] for name in item if name != "id"} for item in events[-1]["response"]["output"]]
        output = {"type": "function_call_output", "call_id": self.call(events)[0], "output": result}
        return body | {"input": [*body["input"], *items, output]}


class OpenCode:
    def call(self, events: list[Json]) -> Call:
        pieces = [piece for event in events for choice in event["choices"] for piece in choice["delta"].get("tool_calls", [])]
        arguments = "".join(piece["function"]["arguments"] for piece in pieces)
        return pieces[0]["id"], pieces[0]["function"]["name"], orjson.loads(arguments)

    def prompt(self, events: list[Json]) -> tuple[int, int | None]:
        usage = events[-1]["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def next_body(self, body: Json, events: list[Json], result: str) -> Json:
        call_id, name, arguments = self.call(events)
        function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
        calls = [{"id": call_id, "type": "function", "function": function}]
        answered = {"role": "tool", "tool_call_id": call_id, "content": result}
        return body | {"messages": [*body["messages"], {"role": "assistant", "content": "", "tool_calls": calls}, answered]}


class OpenWebUi:
    """Open WebUI on a server that it takes for Ollama."""

    def call(self, events: list[Json]) -> Call:
        (call,) = self._calls(events)
        return call["id"], call["function"]["name"], call["function"]["arguments"]

    def prompt(self, events: list[Json]) -> tuple[int, int | None]:
        return events[-1]["prompt_eval_count"], None

    def next_body(self, body: Json, events: list[Json], result: str) -> Json:
        calls = self._calls(events)
        answered = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
        return body | {"messages": [*body["messages"], {"role": "assistant", "content": "", "tool_calls": calls}, answered]}

    def _calls(self, events: list[Json]) -> list[Json]:
        return [call for event in events for call in event["message"].get("tool_calls", [])]


AGENTS: dict[str, Agent] = {
    "claude_code": ClaudeCode(),
    "codex": Codex(),
    "opencode": OpenCode(),
    "open_webui": OpenWebUi(),
}
