"""Functionary: a name, then JSON, in tags (version 3.1) or behind the mark of a recipient (3.2).

functionary_v31   <function=f>{"a": 1}</function>
functionary_v32   >>>f\n{"a": 1}     and for a text >>>all\nHello. The prompt ends with the first >>>.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.messages import Parsing
from engine.parsers.family import CallFamily, Tools, object_text
from engine.parsers.grammar import ANY_TEXT, Lark, MarkerIds, json_rule, literal, marker, nested, object_schema
from engine.parsers.reader import Malformed, Reader, Reading

TAG, TAG_END = "<function=", "</function>"
RECIPIENT, EVERYBODY = ">>>", "all"
_NAME = re.compile(r"[^<>\s{]*")


class FunctionaryV31(CallFamily):
    name = "functionary_v31"
    triggers = (TAG,)
    markers = (TAG_END,)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        name = yield from reader.name(_NAME)
        yield from reader.literal(">")
        if name not in tools.functions:
            raise Malformed
        yield from reader.space()
        arguments = object_text((yield from reader.json()))
        yield from reader.space()
        yield from reader.last_literal(TAG_END)
        reader.complete(name, arguments)

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return "", "", ""

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        begin, end = marker(TAG, id_of), marker(TAG_END, id_of)
        return f"{begin} {literal(f'{name}>')} {json_rule(object_schema(parameters), strict)} {end}"


class FunctionaryV32(CallFamily):
    name = "functionary_v32"
    triggers = (RECIPIENT,)
    openings = string.ascii_letters + string.digits + "_"  # the first name of an answer follows the prompt's mark

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        name = yield from reader.name(_NAME)
        if name != EVERYBODY and name not in tools.functions:
            raise Malformed
        yield from reader.literal("\n")
        if name == EVERYBODY:
            reader.section = "content"
            return
        arguments = object_text((yield from reader.json()))
        reader.complete(name, arguments)

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return "", marker(RECIPIENT, id_of), ""

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        head = literal(f"{name}\n")
        return f"{head} {json_rule(object_schema(parameters), strict)}"

    def grammar(self, tools: Tools, parsing: Parsing, id_of: MarkerIds, free: Sequence[str] = (), format_lark: str = "") -> str:
        """Return Lark as in the base class. A text is one to everybody; it may precede calls."""
        lark = super().grammar(tools, self._forced(parsing), id_of, free)
        if parsing.choice != "auto":
            return lark
        rest = lark.removeprefix("start: calls\n")
        text = literal(f"{EVERYBODY}\n")
        if format_lark:
            return f"start: calls | {text} {nested(format_lark)} | {nested(format_lark)}\n{rest}"
        if id_of(RECIPIENT) is None:
            head = f"head[lazy]: TEXT {literal(RECIPIENT)}"
        else:
            head = f"head: TEXT {marker(RECIPIENT, id_of)}"
        return f"start: calls | {text} (head calls | TEXT)\n{head}\nTEXT: {ANY_TEXT}\n{rest}"

    @staticmethod
    def _forced(parsing: Parsing) -> Parsing:
        """Return `parsing` with calls alone."""
        return msgspec.structs.replace(parsing, choice="required") if parsing.choice == "auto" else parsing


FAMILIES = (FunctionaryV31(), FunctionaryV32())
