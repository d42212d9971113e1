r"""Calls in tags, with untyped values.

    qwen3_coder   <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
    seed_oss      <seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>
    minimax_m2    <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>
    deepseek_v32  the same with <｜DSML｜function_calls>, <｜DSML｜invoke ...> and <｜DSML｜parameter name="a" string="false">
    deepseek_v4   the same with <｜DSML｜tool_calls>

Models leave tags out. What they certainly mean is read: a function of the request without the first tag, a value that the next
parameter or the end of the function ends, a function that the end of the calls ends, several functions in a row, and calls
without their last tag. Text in a value that only looks like a tag stays part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

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
from engine.parsers.reader import MAX_NAME_CHARACTERS, Malformed, Reader, Reading
from engine.parsers.text_grammar import carried_text
from engine.parsers.typed_values import any_json, string_of, typed, typed_python, types_of

LINE = "\n"
_NAME = re.compile(r"[^<>\s\"]*")
_KEY = re.compile(r"[^<>\n\"]*")

Typed = Callable[[str, dict[str, Any], str], str]
"""Value of a parameter as JSON text: its text, the function's parameters, its name."""


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    begin: str  # of all calls
    end: str
    function: str = "<function="  # up to the name
    function_end: str = "</function>"
    parameter: str = "<parameter="  # up to the name
    parameter_end: str = "</parameter>"
    name_end: str = ">"  # behind the name of a function
    parameter_name_end: str = ">"
    string_name_end: str = ""  # the same for a parameter that is a string, if the format makes a difference
    is_shared: bool = False  # one `begin` and `end` for all functions, as a grammar writes them
    has_value_lines: bool = False  # a value is on lines of its own


class XmlCalls(CallFamily):
    def __init__(self, name: str, tags: Tags, typed: Typed = typed) -> None:
        self.name = name
        self._tags = tags
        self._typed = typed
        self.triggers = (tags.begin, tags.function)
        self.markers = (tags.end,)

    # ------------------------------------------------------------------------------------------------------------ reading

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        tags = self._tags
        is_complete = trigger == tags.begin  # without the first tag, the end of a function completes it
        before = trigger
        while before != tags.end:
            if before == tags.begin:
                yield from reader.space()
                yield from reader.literal(tags.function)
            name = yield from reader.name(_NAME)
            if not is_complete and name not in tools.functions:
                raise Malformed
            yield from reader.literal(tags.name_end)
            arguments, before = yield from self._arguments(reader, tools.functions.get(name, {}))
            text = json_object(arguments)
            if before == tags.function_end and not is_complete:
                reader.complete(name, text)
                before = yield from self._behind_function(reader)
                continue
            if before == tags.function_end:
                before = yield from self._behind_function(reader)
            reader.complete(name, text)

    def _behind_function(self, reader: Reader) -> Reading[str]:
        """Read the tag behind a function's end."""
        yield from reader.space()
        if (yield from reader.has_ended()):
            return self._tags.end
        return (yield from reader.one_of(self._tags.end, self._tags.function))

    def _arguments(self, reader: Reader, parameters: dict[str, Any]) -> Reading[tuple[dict[str, str], str]]:
        """Read the parameters of a function and the tag behind them. Return them as JSON texts, and the tag."""
        tags = self._tags
        arguments: dict[str, str] = {}
        end = tags.parameter_end
        while end == tags.parameter_end:
            yield from reader.space()
            found = yield from reader.one_of(tags.parameter, tags.function_end, tags.end)
            if found != tags.parameter:
                return arguments, found
            key = yield from reader.run(_KEY, MAX_NAME_CHARACTERS)
            head = yield from reader.one_of(*self._heads)
            while head:
                value, end, next_key, next_head = yield from self._value(reader, parameters, {*arguments, key})
                arguments[key] = self._json(value, head, parameters, key)
                key, head = next_key, next_head
        return arguments, end

    @property
    def _heads(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._tags.parameter_name_end, self._tags.string_name_end)))

    def _json(self, value: str, head: str, parameters: dict[str, Any], key: str) -> str:
        tags = self._tags
        if tags.has_value_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        if head == tags.string_name_end:
            return string_of(value)
        found = any_json(value) if tags.string_name_end else None
        return self._typed(value, parameters, key) if found is None else found

    def _value(self, reader: Reader, parameters: dict[str, Any], known: set[str]) -> Reading[tuple[str, str, str, str]]:
        """Read a value and the tag behind it. Return them; if the tag is the head of the next parameter, also that one's name
        and the end of its head. `known`: parameters that were given."""
        tags = self._tags
        marks = (tags.parameter_end, tags.parameter, tags.function_end)
        parts: list[str] = []
        text, mark = yield from reader.until(*marks)
        while True:
            parts.append(text)
            if mark == tags.parameter_end:
                return "".join(parts), mark, "", ""
            if mark == tags.parameter:
                key = yield from reader.run(_KEY)
                head, read = yield from reader.if_one_of(*self._heads)
                if head and text.endswith("\n") and key in properties_of(parameters) and key not in known:
                    return "".join(parts), mark, key, head
                parts += mark, key, read
                text, mark = yield from reader.until(*marks)
                continue
            value = "".join(parts)
            found = ""
            for following in (
                (tags.end, tags.function),
                (tags.begin,),
            ):  # behind the function's end, and behind that of all calls
                parts.append(mark)
                space = yield from reader.space()
                if (yield from reader.has_ended()):
                    return value, found or tags.end, "", ""
                found, read = yield from reader.if_one_of(*following, *marks)
                if found in following and found != tags.end:
                    return value, found, "", ""
                if found != tags.end:
                    break
                parts.append(space)
                mark = found
            if found in marks:
                text, mark = space, found
            else:
                parts += space, read
                text, mark = yield from reader.until(*marks)

    # ------------------------------------------------------------------------------------------------------------ grammar

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        tags = self._tags
        if not tags.is_shared:
            return "", literal("\n"), ""
        return f"{marker(tags.begin, id_of)} {literal(LINE)}", "", marker(tags.end, id_of)

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        tags = self._tags
        line = LINE if tags.has_value_lines else ""
        value_end = f"{line}{tags.parameter_end}{LINE}"
        lark.add("up_to_end", ANY_TEXT, options=f"[suffix={literal(tags.parameter_end)}]")  # no value contains this
        required = required_of(parameters)
        items = []
        for key, schema in properties_of(parameters).items():
            is_text = "string" in (types_of(schema, parameters) or {"string"})
            head = tags.string_name_end if is_text and tags.string_name_end else tags.parameter_name_end
            value = json_rule(with_definitions(schema, parameters), strict)
            text = carried_text(schema) if strict else None
            if text is not None:
                value = f"{nested(text)} {literal(value_end)}"
            else:
                value = f"up_to_end {literal(LINE)}" if is_text else f"{value} {literal(value_end)}"
            items.append((f"{literal(f'{tags.parameter}{key}{head}{line}')} {value}", key not in required))
        values = in_order(lark, f"{rule}_parameters", items)
        head = f"{marker(tags.function, id_of)} {literal(f'{name}{tags.name_end}{LINE}')}"
        call = f"{head} {values} {literal(f'{tags.function_end}{LINE}')}"
        if tags.is_shared:
            return call
        return f"{marker(tags.begin, id_of)} {literal(LINE)} {call} {marker(tags.end, id_of)}"


_QWEN = Tags(begin="<tool_call>", end="</tool_call>", has_value_lines=True)


def _dsml(calls: str) -> Tags:
    return Tags(
        begin=f"<｜DSML｜{calls}>",
        end=f"</｜DSML｜{calls}>",
        function='<｜DSML｜invoke name="',
        function_end="</｜DSML｜invoke>",
        parameter='<｜DSML｜parameter name="',
        parameter_end="</｜DSML｜parameter>",
        name_end='">',
        parameter_name_end='" string="false">',
        string_name_end='" string="true">',
        is_shared=True,
    )


FAMILIES = (
    XmlCalls("qwen3_coder", _QWEN),
    XmlCalls("seed_oss", Tags(begin="<seed:tool_call>", end="</seed:tool_call>"), typed=typed_python),
    XmlCalls(
        "minimax_m2",
        Tags(
            begin="<minimax:tool_call>",
            end="</minimax:tool_call>",
            function='<invoke name="',
            function_end="</invoke>",
            parameter='<parameter name="',
            name_end='">',
            parameter_name_end='">',
            is_shared=True,
        ),
    ),
    XmlCalls("deepseek_v32", _dsml("function_calls")),
    XmlCalls("deepseek_v4", _dsml("tool_calls")),
)
