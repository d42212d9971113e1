"""Qwen 3 Coder and Qwen 3.5: XML-like, with untyped values.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.parsers.family import CallFamily, Tools, decoded, json_object
from engine.parsers.grammar import (
    ANY_TEXT,
    Lark,
    MarkerIds,
    in_order,
    json_rule,
    literal,
    marker,
    nested,
    properties_of,
    required_of,
    with_definitions,
)
from engine.parsers.reader import MAX_NAME_CHARACTERS, Malformed, Reader, Reading
from engine.parsers.text_grammar import carried_text

_NAME = re.compile(r"[^<>\s]*")
_KEY = re.compile(r"[^<>\n]*")
LINE, VALUE_END = "\n", "\n</parameter>\n"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_TYPES_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class Qwen3Coder(CallFamily):
    name = "qwen3_coder"
    triggers = ("<tool_call>",)
    markers = ("</tool_call>",)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        yield from reader.literal("<function=")
        name = yield from reader.name(_NAME)
        yield from reader.literal(">")
        arguments: dict[str, str] = {}
        while True:
            yield from reader.space()
            yield from reader.literal("<")
            if (yield from reader.peek()) == "/":
                break
            yield from reader.literal("parameter=")
            key = yield from reader.run(_KEY, MAX_NAME_CHARACTERS)
            yield from reader.literal(">")
            value = yield from reader.until("</parameter>")
            arguments[key] = typed(value.removeprefix("\n").removesuffix("\n"), tools.functions.get(name, {}), key)
        yield from reader.literal("/function>")
        yield from reader.space()
        yield from reader.literal("</tool_call>")
        reader.complete(name, json_object(arguments))

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        begin, end = marker("<tool_call>", id_of), marker("</tool_call>", id_of)
        lark.add("up_to_end", ANY_TEXT, options=f"[suffix={literal('</parameter>')}]")  # no value contains this
        required = required_of(parameters)
        items = []
        for key, schema in properties_of(parameters).items():
            is_text = "string" in (types_of(schema, parameters) or {"string"})
            value = json_rule(with_definitions(schema, parameters), strict)
            text = carried_text(schema) if strict else None
            if text is not None:
                value = f"{nested(text)} {literal(VALUE_END)}"
            else:
                value = f"up_to_end {literal(LINE)}" if is_text else f"{value} {literal(VALUE_END)}"
            items.append((f"{literal(f'<parameter={key}>{LINE}')} {value}", key not in required))
        values = in_order(lark, f"{rule}_parameters", items)
        head, tail = literal(f"{LINE}<function={name}>{LINE}"), literal(f"</function>{LINE}")
        return f"{begin} {head} {values} {tail} {end}"


FAMILY = Qwen3Coder()


def typed(text: str, parameters: dict[str, Any], key: str) -> str:
    """Return a value as JSON text, with the type in the schema of `parameters`; a string if it names or allows no other
    type."""
    properties = parameters.get("properties")
    types = types_of(properties.get(key) if isinstance(properties, dict) else None, parameters)
    if types - {"string"}:
        bare = _PYTHON_WORDS.get(text.strip(), text)
        try:
            found = _TYPES_OF[type(decoded(bare, Any))]
        except Malformed:
            found = "string"
        if found != "string" and (found in types or (found == "integer" and "number" in types)):
            return bare.strip()
    return orjson.dumps(text).decode()


_TYPE_BY_KEYWORD = {  # for schemas without a type
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "minimum": "number",
    "maximum": "number",
    "multipleOf": "number",
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
}
_MAX_PARTS = 200  # parts of a schema that are checked


def types_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> set[str]:
    """Return the JSON types that a schema allows, as far as directly visible. `seen`: ids of visited parts; each is visited
    once, however many refer to it."""
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) >= _MAX_PARTS:
        return set()
    seen.add(id(schema))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return types_of(target, root, seen)
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = {name for name in names if isinstance(name, str)}
    for other in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(other)
        for branch in branches if isinstance(branches, list) else ():
            types |= types_of(branch, root, seen)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = {_TYPES_OF.get(type(value), "string") for value in values} if isinstance(values, list) else set()
    if not types:
        types = {type_ for keyword, type_ in _TYPE_BY_KEYWORD.items() if keyword in schema}
    return types | {"null"} if types and schema.get("nullable") is True else types
