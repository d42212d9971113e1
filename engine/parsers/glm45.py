"""GLM-4.5 to 4.7: a name, then pairs of tags with untyped values. GLM-4.7 writes no line breaks.

<tool_call>f
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, json_object
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
from engine.parsers.reader import Reader, Reading
from engine.parsers.text_grammar import carried_text
from engine.parsers.typed_values import typed, types_of

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>\s{]*")
_KEY = re.compile(r"[^<>\n]*")


class Glm45(CallFamily):
    name = "glm45"
    triggers = (BEGIN,)
    markers = (END, KEY, KEY_END, VALUE, VALUE_END)

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        name = yield from reader.name(_NAME)
        parameters = tools.functions.get(name, {})
        arguments: dict[str, str] = {}
        while True:
            yield from reader.space()
            if (yield from reader.one_of(KEY, END)) == END:
                break
            key = (yield from reader.name(_KEY)).strip()
            yield from reader.literal(KEY_END)
            yield from reader.space()
            yield from reader.literal(VALUE)
            value, _ = yield from reader.until(VALUE_END)
            arguments[key] = typed(value, parameters, key)
        reader.complete(name, json_object(arguments))

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        key_begin, key_end, value_begin, value_end = (marker(tag, id_of) for tag in (KEY, KEY_END, VALUE, VALUE_END))
        if id_of(VALUE_END) is None:
            lark.add("up_to_end", ANY_TEXT, options=f"[suffix={literal(VALUE_END)}]")
        required = required_of(parameters)
        line = literal("\n")
        items = []
        for key, schema in properties_of(parameters).items():
            is_text = "string" in (types_of(schema, parameters) or {"string"})
            text = carried_text(schema) if strict else None
            if text is not None:
                value = f"{nested(text)} {value_end}"
            elif is_text:
                value = "up_to_end" if id_of(VALUE_END) is None else f"VALUE {value_end}"
            else:
                value = f"{json_rule(with_definitions(schema, parameters), strict)} {value_end}"
            items.append((f"{key_begin} {literal(key)} {key_end} {line} {value_begin} {value} {line}", key not in required))
        lark.add("VALUE", ANY_TEXT)
        values = in_order(lark, f"{rule}_arguments", items)
        return f"{marker(BEGIN, id_of)} {literal(f'{name}')} {line} {values} {marker(END, id_of)}"


FAMILIES = (Glm45(),)
