"""DeepSeek V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.deepseek_v3 import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, DeepSeekV3
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, marker, object_schema
from engine.parsers.reader import Reader, Reading

_WORD = re.compile(r"[^<\s]*")


class DeepSeekV31(DeepSeekV3):
    name = "deepseek_v31"

    def _call(self, reader: Reader) -> Reading[tuple[str, str]]:
        yield from reader.space()
        name = yield from reader.name(_WORD)
        yield from reader.literal(SEPARATOR)
        yield from reader.space()
        arguments = yield from reader.json()
        yield from reader.space()
        return name, arguments

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return marker(CALLS_BEGIN, id_of), "", marker(CALLS_END, id_of)

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        begin, separator, end = (marker(text, id_of) for text in (CALL_BEGIN, SEPARATOR, CALL_END))
        return f"{begin} {literal(name)} {separator} {json_rule(object_schema(parameters), strict)} {end}"


FAMILIES = (DeepSeekV31(),)
