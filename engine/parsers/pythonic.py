"""Models that write Python: Llama 4, ToolACE, LFM2.

    [f(a=1, b="x"), g()]

With or without markers around it; without, only text that begins with one of the request's tools is a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, json_object
from engine.parsers.grammar import Lark, MarkerIds, in_order, json_rule, literal, properties_of, required_of, with_definitions
from engine.parsers.python_literals import read_value
from engine.parsers.reader import Malformed, Reader, Reading

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"\w*")
_ENDS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}


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
            pairs[key] = yield from read_value(reader)
            yield from reader.space()
            if (yield from reader.peek()) != ")":
                yield from reader.literal(",")
                yield from reader.space()
        yield from reader.literal(")")
        return json_object(pairs)

    def write(self, calls: list[tuple[str, Any]]) -> str:
        begin = self.triggers[0]
        each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"{begin}[{', '.join(each)}]{_ENDS[begin]}"

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return literal("["), literal(", "), literal("]")

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        required = required_of(parameters)
        items = [
            (f"{literal(f'{key}=')} {json_rule(with_definitions(schema, parameters), strict)}", key not in required)
            for key, schema in properties_of(parameters).items()
        ]
        return f"{literal(f'{name}(')} {in_order(lark, f'{rule}_arguments', items, ', ')} {literal(')')}"


FAMILIES = (Pythonic(),)
