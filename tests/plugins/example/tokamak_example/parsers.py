"""Calls such as `@@f {"a": 1}@@`, and reasoning between `<<` and `>>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, object_text
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, object_schema
from engine.parsers.reader import Reader, Reading
from engine.parsers.thinking import ThinkingFamily

_NAME = re.compile(r"[\w.-]*")


class ExampleCalls(CallFamily):
    name = "example"
    triggers = ("@@",)
    template_marks = ("@@", "<<")

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        name = yield from reader.name(_NAME)
        yield from reader.space()
        arguments = object_text((yield from reader.json()))
        yield from reader.last_literal("@@")
        reader.complete(name, arguments)

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        return f"{literal(f'@@{name} ')} {json_rule(object_schema(parameters), strict)} {literal('@@')}"


PARSERS = [ExampleCalls(), ThinkingFamily("example", "<<", ">>")]
