"""Completes tools and calls with the optional fields that some templates read without asking.

Called by `template.py` if a template fails on a conversation as it was sent. Pure: nothing is changed in place.
"""

from __future__ import annotations

from typing import Any

from engine.tokenizer.chat.messages import Message

Tool = dict[str, Any]


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
