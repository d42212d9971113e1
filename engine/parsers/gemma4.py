"""Gemma 4: a notation like JSON's, without quotes around keys and with a marker around strings.

<|tool_call>call:f{a:1,b:<|"|>x<|"|>,c:{d:[true,null]}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, decoded, json_object
from engine.parsers.grammar import (
    ANY_TEXT,
    Lark,
    MarkerIds,
    in_order,
    json_rule,
    literal,
    marker,
    properties_of,
    required_of,
    with_definitions,
)
from engine.parsers.python_literals import MAX_DEPTH
from engine.parsers.reader import Malformed, Reader, Reading
from engine.parsers.typed_values import string_of, types_of

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[^{\s<]*")
_KEY = re.compile(r"[^:{}\[\],<]*")
_BARE = re.compile(r"[^,\[\]{}<]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as templates print them


class Gemma4(CallFamily):
    name = "gemma4"
    triggers = (BEGIN,)
    markers = (END, QUOTE)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        yield from reader.literal("call:")
        name = yield from reader.name(_NAME)
        arguments = yield from self._members(reader, MAX_DEPTH)
        yield from reader.last_literal(END)
        reader.complete(name, arguments)

    def _members(self, reader: Reader, depth: int) -> Reading[str]:
        """Read an object, with its brackets; return JSON text."""
        yield from reader.literal("{")
        members: dict[str, str] = {}
        separator = ","
        yield from reader.space()
        if (yield from reader.peek()) == "}":
            separator = yield from reader.one_of("}")
        while separator == ",":
            yield from reader.space()
            if (yield from reader.peek()) == "<":
                key = yield from self._string(reader)
                yield from reader.space()
            else:
                key = (yield from reader.name(_KEY)).strip().strip('"')
            yield from reader.literal(":")
            members[key] = yield from self._value(reader, depth - 1)
            separator = yield from reader.one_of(",", "}")
        return json_object(members)

    def _value(self, reader: Reader, depth: int) -> Reading[str]:
        """Read a value and the space around it; return JSON text."""
        yield from reader.space()
        first = yield from reader.peek()
        if not depth:
            raise Malformed
        if first == "<":
            value = string_of((yield from self._string(reader)))
        elif first == "{":
            value = yield from self._members(reader, depth)
        elif first == "[":
            value = yield from self._items(reader, depth)
        else:
            bare = (yield from reader.run(_BARE)).strip()
            value = _CONSTANTS.get(bare, bare)
            decoded(value, Any)
        yield from reader.space()
        return value

    def _items(self, reader: Reader, depth: int) -> Reading[str]:
        yield from reader.literal("[")
        items: list[str] = []
        yield from reader.space()
        separator = ","
        if (yield from reader.peek()) == "]":
            separator = yield from reader.one_of("]")
        while separator == ",":
            items.append((yield from self._value(reader, depth - 1)))
            separator = yield from reader.one_of(",", "]")
        return f"[{', '.join(items)}]"

    def _string(self, reader: Reader) -> Reading[str]:
        yield from reader.literal(QUOTE)
        text, _ = yield from reader.until(QUOTE)
        return text

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return "", "", ""

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        """Return a call whose texts are written between markers, and other values as JSON without texts inside."""
        quote = marker(QUOTE, id_of)
        required = required_of(parameters)
        items: list[tuple[str, bool]] = []
        for key, schema in properties_of(parameters).items():
            value = self._value_rule(lark, f"{rule}_{len(items)}", schema, parameters, quote, strict)
            items.append((f"{literal(f'{key}:')} {value}", key not in required))
        values = in_order(lark, f"{rule}_arguments", items, ",")
        return f"{marker(BEGIN, id_of)} {literal(f'call:{name}{{')} {values} {literal('}')} {marker(END, id_of)}"

    def _value_rule(
        self, lark: Lark, rule: str, schema: Any, root: Mapping[str, Any], quote: str, strict: bool, depth: int = 8
    ) -> str:
        """Return the rule of a value, in the notation of the family: the types, members, items and constants of its schema."""
        schema = schema if isinstance(schema, dict) else {}
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        if values is not None:
            return lark.one_of(rule, [_constant(value, quote) for value in values]) if values else _any(lark, quote)
        types = types_of(schema, root)
        if "type" not in schema or len(types) != 1 or not depth:
            return _text(lark, quote) if types == {"string"} else _any(lark, quote)
        (type_,) = types
        if type_ == "string":
            return _text(lark, quote)
        if type_ == "array":
            item = self._value_rule(lark, f"{rule}_item", schema.get("items"), root, quote, strict, depth - 1)
            return lark.add(rule, f'"[" ({item} ("," {item})*)? "]"')
        if type_ == "object":
            if not properties_of(schema):
                return _any_object(lark, quote)
            required = required_of(schema)
            members: list[tuple[str, bool]] = []
            for key, own in properties_of(schema).items():
                value = self._value_rule(lark, f"{rule}_{len(members)}", own, root, quote, strict, depth - 1)
                members.append((f"{literal(f'{key}:')} {value}", key not in required))
            return lark.add(rule, f'"{{" {in_order(lark, f"{rule}_members", members, ",")} "}}"')
        return json_rule(with_definitions(schema, root), strict)


def _text(lark: Lark, quote: str) -> str:
    if quote.startswith("<["):
        lark.add("QUOTED", ANY_TEXT)
        return f"{quote} QUOTED {quote}"
    return f"{quote} {lark.add('quoted', ANY_TEXT, options=f'[suffix={quote}]')}"


def _constant(value: Any, quote: str) -> str:
    """Return Lark of a value that a schema names."""
    if isinstance(value, str):
        return f"{quote} {literal(value)} {quote}" if value else f"{quote} {quote}"
    if isinstance(value, dict):
        members = ' "," '.join(f"{literal(f'{key}:')} {_constant(own, quote)}" for key, own in value.items())
        return f'"{{" {members} "}}"'
    if isinstance(value, list):
        items = ' "," '.join(_constant(item, quote) for item in value)
        return f'"[" {items} "]"'
    return literal(json.dumps(value))


def _any(lark: Lark, quote: str) -> str:
    """Return the rule of any value."""
    lark.one_of("any_value", [_text(lark, quote), json_rule({"type": ["number", "boolean", "null"]}, False), "any_items"])
    lark.add("any_items", '"[" (any_value ("," any_value)*)? "]" | any_members')
    lark.add("any_members", '"{" (any_member ("," any_member)*)? "}"')
    lark.add("any_member", '/[A-Za-z_][A-Za-z0-9_]*/ ":" any_value')
    return "any_value"


def _any_object(lark: Lark, quote: str) -> str:
    _any(lark, quote)
    return "any_members"


FAMILIES = (Gemma4(),)
