"""DeepSeek V3 and R1: JSON in a fence of Markdown.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜> ... <｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, object_text
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, marker, object_schema
from engine.parsers.reader import Reader, Reading

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"
_WORD = re.compile(r"[^<\s]*")
_LINE = re.compile(r"[^<\n]*")


class DeepSeekV3(CallFamily):
    name = "deepseek_v3"
    triggers = (CALLS_BEGIN, CALL_BEGIN)  # the latter after a text that was no call
    markers = (CALLS_END, CALL_END, SEPARATOR)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        shared = "<｜tool▁call"  # common beginning of a call's beginning and the end of all calls
        if trigger == CALLS_BEGIN:
            yield from reader.space()
            yield from reader.literal(CALL_BEGIN)
        while True:
            name, arguments = yield from self._call(reader)
            yield from reader.literal(CALL_END)
            reader.complete(name, object_text(arguments))
            yield from reader.space()
            if (yield from reader.has_ended()):
                return
            yield from reader.literal(shared)
            if (yield from reader.peek()) == "s":
                yield from reader.literal(CALLS_END[len(shared) :])
                return
            yield from reader.literal(CALL_BEGIN[len(shared) :])

    def _call(self, reader: Reader) -> Reading[tuple[str, str]]:
        """Read name and arguments between the markers."""
        yield from reader.name(_WORD)
        yield from reader.literal(SEPARATOR)
        name = yield from reader.name(_LINE)
        yield from reader.literal("\n```json")
        yield from reader.space()
        arguments = yield from reader.json()
        yield from reader.space()
        yield from reader.literal("```")
        yield from reader.space()
        return name.strip(), arguments

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return marker(CALLS_BEGIN, id_of), literal("\n"), marker(CALLS_END, id_of)

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        begin, separator, end = (marker(text, id_of) for text in (CALL_BEGIN, SEPARATOR, CALL_END))
        arguments = json_rule(object_schema(parameters), strict)
        return f"{begin} {literal('function')} {separator} {literal(f'{name}{FENCE}')} {arguments} {literal(FENCE_END)} {end}"


FAMILIES = (DeepSeekV3(),)
