"""Models that write Python: Llama 4, ToolACE, LFM2.

    [f(a=1, b="x"), g()]

With or without markers around it; without, only text that begins with one of the request's tools is a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.parsers.family import CallFamily, Tools, decoded, json_object
from engine.parsers.grammar import Lark, MarkerIds, in_order, json_rule, literal, properties_of, required_of, with_definitions
from engine.parsers.reader import Malformed, Reader, Reading

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"\w*")
_NUMBER = re.compile(r"[-+.\w]*")
_DIGITS = re.compile(r"[0-9A-Fa-f]*")
_TEXT = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""} | {
    character: character for character in "\\'\""
}
_CODES = {"x": 2, "u": 4, "U": 8}
_ENDS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
MAX_DEPTH = 64  # of nested lists and dictionaries


class Pythonic(CallFamily):
    name = "pythonic"
    triggers = tuple(_ENDS)
    markers = tuple(_ENDS.values())
    ends = _ENDS
    openings = "["

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        yield from reader.literal("[")
        while True:
            yield from reader.space()
            name = yield from reader.name(_NAME)
            if not trigger and name not in tools.functions:
                raise Malformed
            yield from reader.literal("(")
            reader.complete(name, (yield from self._arguments(reader)))
            yield from reader.space()
            if (yield from reader.one_of(",", "]")) == "]":
                break
        if trigger:
            yield from reader.space()
            yield from reader.literal(_ENDS[trigger])

    def _arguments(self, reader: Reader) -> Reading[str]:
        """Read up to the closing bracket; return JSON text."""
        pairs: dict[str, str] = {}
        yield from reader.space()
        while (yield from reader.peek()) != ")":
            key = yield from reader.name(_KEY)
            yield from reader.space()
            yield from reader.literal("=")
            pairs[key] = yield from self._value(reader, MAX_DEPTH)
            yield from reader.space()
            if (yield from reader.peek()) != ")":
                yield from reader.literal(",")
                yield from reader.space()
        yield from reader.literal(")")
        return json_object(pairs)

    def _value(self, reader: Reader, depth: int) -> Reading[str]:
        """Read a literal; return JSON text."""
        yield from reader.space()
        first = yield from reader.peek()
        if not depth:
            raise Malformed
        if first in _TEXT:
            return (yield from self._text(reader))
        if first in "[(":
            items = yield from self._items(reader, "]" if first == "[" else ")", depth)
            return f"[{', '.join(items)}]"
        if first == "{":
            items = yield from self._items(reader, "}", depth)
            return f"{{{', '.join(items)}}}"
        word = yield from reader.run(_NUMBER)
        if word not in _WORDS:
            decoded(word, float)
        return _WORDS.get(word, word)

    def _items(self, reader: Reader, end: str, depth: int) -> Reading[list[str]]:
        """Read the items of a list, tuple or dictionary, with its brackets."""
        items: list[str] = []
        yield from reader.one_of("[", "(", "{")
        yield from reader.space()
        while (yield from reader.peek()) != end:
            if end == "}":
                item = yield from self._text(reader)
                yield from reader.space()
                yield from reader.literal(":")
                item += ": " + (yield from self._value(reader, depth - 1))
            else:
                item = yield from self._value(reader, depth - 1)
            items.append(item)
            yield from reader.space()
            if (yield from reader.peek()) != end:
                yield from reader.literal(",")
                yield from reader.space()
        yield from reader.literal(end)
        return items

    def _text(self, reader: Reader) -> Reading[str]:
        """Read a string; return JSON text."""
        parts: list[str] = []
        quote = yield from reader.one_of(*_TEXT)
        while True:
            parts.append((yield from reader.run(_TEXT[quote])))
            if (yield from reader.one_of(quote, "\\")) == quote:
                break
            letter = yield from reader.peek()
            yield from reader.literal(letter)
            if letter in _CODES:
                digits = ""
                while len(digits) < _CODES[letter]:
                    digit = yield from reader.peek()
                    if not _DIGITS.fullmatch(digit):
                        raise Malformed
                    yield from reader.literal(digit)
                    digits += digit
                if int(digits, 16) > 0x10FFFF:
                    raise Malformed
                parts.append(chr(int(digits, 16)))
            else:
                parts.append(_ESCAPES.get(letter, "\\" + letter))
        text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # surrogate pairs become characters
        return orjson.dumps(text).decode()

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return literal("["), literal(", "), literal("]")

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        required = required_of(parameters)
        items = [
            (f"{literal(f'{key}=')} {json_rule(with_definitions(schema, parameters), strict)}", key not in required)
            for key, schema in properties_of(parameters).items()
        ]
        return f"{literal(f'{name}(')} {in_order(lark, f'{rule}_arguments', items, ', ')} {literal(')')}"


FAMILY = Pythonic()
