"""Converts custom tools, called with a text instead of JSON arguments, to functions of one parameter. Pure.

Used by the handlers of chat and of the Responses API. The grammar of the text is part of the parameter's schema
(`engine/parsers/text_grammar.py`).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

INPUT = "input"  # the only parameter
LARK = "x-lark"


def function_of(name: str, description: str | None, syntax: str | None, definition: str | None) -> dict[str, Any]:
    """Return the function for a custom tool. `syntax`: of its `definition`, "lark" or "regex"; None: any text."""
    schema: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    if definition is not None:
        schema[LARK] = _regex_grammar(definition) if syntax == "regex" else definition
        function["strict"] = True
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return function | {"parameters": parameters}


def input_of(arguments: str) -> str:
    """Return the text that a model gave to a custom tool; if it is not the expected JSON, everything it wrote."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])[INPUT]
    except (msgspec.MsgspecError, KeyError):
        return arguments


def _regex_grammar(regex: str) -> str:
    regex = re.sub(r"(?<!\\)\$$", "", regex.removeprefix("^"))  # it matches the whole text anyway
    body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", regex).replace("\n", "\\n").replace("\r", "\\r")
    return f"start: /{body}/"
