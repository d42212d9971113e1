"""Custom tools of chat requests: converts them to functions for the engine, and their calls back.

Used by the handlers of conversations in the api process. `api/custom_tools.py` defines the function for a custom tool.
"""

from __future__ import annotations

from typing import Any

from api.custom_tools import INPUT, function_of
from api.schemas import requests
from api.schemas.requests import AllowedToolChoice, Conversation, CustomDefinition, GrammarToolFormat
from engine.errors import RequestError


def as_functions(fields: dict[str, Any]) -> frozenset[str]:
    """Convert a body's custom tools, and calls and choices of them, to functions. Return their names."""
    if not _has_custom(fields):
        return frozenset()
    body = requests.convert(fields, Conversation)
    names = set()
    for index, tool in enumerate(body.tools or ()):
        if tool.type == "custom":
            custom = _required(tool.custom, f"tools[{index}].custom")
            names.add(custom.name)
            fields["tools"][index] = {"type": "function", "function": _function(custom)}
    for place, message in enumerate(body.messages):
        for index, call in enumerate(message.tool_calls or ()):
            if call.type == "custom":
                made = _required(call.custom, f"messages[{place}].tool_calls[{index}].custom")
                function = {"name": made.name, "arguments": {INPUT: made.input}}
                given = fields["messages"][place]["tool_calls"]
                rest = {name: value for name, value in given[index].items() if name != "custom"}
                given[index] = rest | {"type": "function", "function": function}
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        fields["tool_choice"] = _chosen(choice, "tool_choice")
        if isinstance(choice.get("allowed_tools"), dict):
            allowed = choice["allowed_tools"]
            allowed = allowed | {
                "tools": [
                    _chosen(tool, f"tool_choice.allowed_tools.tools[{index}]") for index, tool in enumerate(allowed["tools"])
                ]
            }
            fields["tool_choice"] = choice | {"allowed_tools": allowed}
    return frozenset(names)


def _has_custom(fields: dict[str, Any]) -> bool:
    """Return whether anything in a (not validated) body has the type custom."""
    messages, choice = fields.get("messages"), fields.get("tool_choice")
    calls = [message.get("tool_calls") for message in _objects(messages)]
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    chosen = allowed.get("tools") if isinstance(allowed, dict) else None
    groups = [fields.get("tools"), chosen, [choice], *calls]
    return any(each.get("type") == "custom" for group in groups for each in _objects(group))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _chosen(choice: dict[str, Any], param: str) -> dict[str, Any]:
    if choice.get("type") != "custom":
        return choice
    return {"type": "function", "function": _required(choice.get("custom"), f"{param}.custom")}


def _required(value: Any, param: str) -> Any:
    if value is None:
        raise RequestError(f"{param} is required", code="missing_required_parameter", param=param)
    return value


def _function(custom: CustomDefinition) -> dict[str, Any]:
    grammar = custom.format.grammar if isinstance(custom.format, GrammarToolFormat) else None
    syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, None)
    return function_of(custom.name, custom.description, syntax, definition)


def require_functions(body: Conversation) -> None:
    """Raise RequestError for a tool, a call or a choice of type function without a function."""
    for index, tool in enumerate(body.tools or ()):
        _required(tool.function, f"tools[{index}].function")
    for place, message in enumerate(body.messages):
        for index, call in enumerate(message.tool_calls or ()):
            _required(call.function, f"messages[{place}].tool_calls[{index}].function")
    if isinstance(body.tool_choice, AllowedToolChoice):
        for index, allowed in enumerate(body.tool_choice.allowed_tools.tools):
            _required(allowed.function, f"tool_choice.allowed_tools.tools[{index}].function")
