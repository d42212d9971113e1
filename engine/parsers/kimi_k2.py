"""Kimi-K2: the id of each call contains the function's name, and results refer to it.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, object_text
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, marker, object_schema
from engine.parsers.reader import Malformed, Reader, Reading

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
_ID = re.compile(r"[^<\s]*")
_PARTS = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)


class KimiK2(CallFamily):
    name = "kimi_k2"
    triggers = (CALLS_BEGIN, CALL_BEGIN)  # the latter after a text that was no call
    markers = (CALLS_END, CALL_END, ARGUMENTS_BEGIN)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        if trigger == CALLS_BEGIN:
            yield from reader.space()
            yield from reader.literal(CALL_BEGIN)
        found = CALL_BEGIN
        while found == CALL_BEGIN:
            yield from reader.space()
            call_id = yield from reader.name(_ID)
            parts = _PARTS.fullmatch(call_id)
            if parts is None:
                raise Malformed
            yield from reader.space()
            yield from reader.literal(ARGUMENTS_BEGIN)
            yield from reader.space()
            arguments = object_text((yield from reader.json()))
            yield from reader.space()
            yield from reader.last_literal(CALL_END)
            reader.complete(parts[1], arguments, call_id if ":" in call_id else "")
            yield from reader.space()
            if (yield from reader.has_ended()):
                return
            found = yield from reader.one_of(CALL_BEGIN, CALLS_END)

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return marker(CALLS_BEGIN, id_of), "", marker(CALLS_END, id_of)

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        begin, arguments, end = (marker(text, id_of) for text in (CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END))
        json = json_rule(object_schema(parameters), strict)
        return f"{begin} {literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {arguments} {json} {end}"


FAMILIES = (KimiK2(),)
