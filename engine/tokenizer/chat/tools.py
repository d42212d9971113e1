"""Gives templates the tools in the form that they read: in a system message, or with optional fields that some do not ask for.

Called by `template.py`. Pure: nothing is changed in place.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.tokenizer.chat.messages import Message

Tool = dict[str, Any]

_IN_MESSAGE = re.compile(r"""["']tools["']|message\.tools""")
_VARIABLE = re.compile(r"\btools\b")


def takes_tools_in_system(source: str) -> bool:
    """Return whether a template reads tools from a system message (Phi-4-mini), not from a variable."""
    return _IN_MESSAGE.search(source) is not None and not _VARIABLE.search(_IN_MESSAGE.sub("", source))


def with_tools_in_system(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """Return the messages with the functions as JSON text in `tools` of the first system message."""
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    place = next((index for index, message in enumerate(messages) if message["role"] == "system"), -1)
    if place < 0:
        return [{"role": "system", "content": "", "tools": text}, *messages]
    return [*messages[:place], messages[place] | {"tools": text}, *messages[place + 1 :]]


def with_all_fields(tools: list[Tool]) -> list[Tool]:
    """Return tools in which each function and parameter has a description, and each function has parameters."""
    return [
        tool | {"function": _function(tool["function"])} if isinstance(tool.get("function"), dict) else tool for tool in tools
    ]


def _function(function: Tool) -> Tool:
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    given = {key: value for key, value in function.items() if value is not None}
    made = empty | given
    parameters = made["parameters"]
    if isinstance(parameters, dict):
        properties = parameters.get("properties")
        known = properties.items() if isinstance(properties, dict) else ()
        described = {key: _described(schema) if isinstance(schema, dict) else schema for key, schema in known}
        made["parameters"] = {"type": "object", "required": []} | parameters | {"properties": described}
    return made


def _described(schema: Tool) -> Tool:
    members = {"additionalProperties": {"type": None}} if schema.get("type") == "object" else {}
    return {"description": "", **members} | schema


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Return the messages with an id in each call and result that has none: its number in the conversation."""
    num_calls = num_results = 0
    made = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                calls.append({"id": f"call_{num_calls}", "type": "function"} | call)
                num_calls += 1
            message = message | {"tool_calls": calls}
        if message["role"] == "tool":
            message = {"tool_call_id": f"call_{num_results}"} | message
            num_results += 1
        made.append(message)
    return made
