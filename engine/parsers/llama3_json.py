"""Llama 3.1 to 3.3: an answer in JSON, with or without a marker before it; several calls are separated by semicolons
or line breaks.

    {"name": "f", "parameters": {"a": 1}}

Without the marker, only a call of one of the request's tools counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, json_call, named_call
from engine.parsers.grammar import Lark, MarkerIds, literal, object_schema
from engine.parsers.reader import Malformed, Reader, Reading

_KEY = re.compile(r"[a-z]*")
_JSON_FORMAT = "start: %json "  # as written by `engine/grammars/formats.py`
_DEFINITIONS = ("$defs", "definitions")
_KEYS = ("name", "parameters", "arguments", "type", "function")


class Llama3Json(CallFamily):
    name = "llama3_json"
    triggers = ("<|python_tag|>",)
    openings = "{"

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        while True:
            yield from reader.space()
            yield from reader.literal("{")
            space = yield from reader.space()
            yield from reader.literal('"')
            key = yield from reader.run(_KEY, max(map(len, _KEYS)))
            if key not in _KEYS:  # so that other JSON is not held back
                raise Malformed
            yield from reader.literal('"')
            call = named_call((yield from reader.json(begun=f'{{{space}"{key}"')))
            if not trigger and call[0] not in tools.functions:
                raise Malformed
            reader.complete(*call)
            space = yield from reader.space()
            if (yield from reader.has_ended()):
                return
            following = yield from reader.peek()
            if following in ";,":
                yield from reader.one_of(";", ",")
            elif following != "{" or "\n" not in space:
                return

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return "", literal("; "), ""

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        return json_call(name, "parameters", parameters, strict)

    def call_beside(self, format_lark: str, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
        """Return a call beside a JSON answer, as JSON with the same white space. llguidance's lexer takes the longest piece and
        never backtracks, so the pieces of both must be the same up to where they differ."""
        _, _, schema = format_lark.rpartition(_JSON_FORMAT)
        try:
            options = json.loads(schema)["x-guidance"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        inner = {key: value for key, value in object_schema(parameters).items() if key not in _DEFINITIONS}
        if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(inner)):
            inner = {"type": "object"}  # refers to a root that is no longer there
        call = {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": inner},
            "required": ["name", "parameters"],
            "additionalProperties": False,
            **{key: parameters[key] for key in _DEFINITIONS if key in parameters},
            "x-guidance": {**options, "lenient": not strict},
        }
        return "%json " + json.dumps(call, ensure_ascii=False)


def _references(schema: Any) -> Iterator[str]:
    """Yield all `$ref` in a schema."""
    rest = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            rest.extend(node.values())
        elif isinstance(node, list):
            rest.extend(node)


FAMILIES = (Llama3Json(),)
