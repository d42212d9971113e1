r"""Calls as JSON between markers: objects, or a list of them.

hermes           <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>     Hermes, Qwen 3, Granite 4, SmolLM3
ernie45          the same, after the reasoning or beside a content in <response> (`thinking.py`)
granite          <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]                 Granite 3; or <tool_call>[...]
phi4_mini_json   functools[{"name": "f", "arguments": {"a": 1}}]    Phi-4-mini; or <|tool_call|>[...]<|/tool_call|>
nemotron         <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>         Nemotron Nano 2
minimax_m1       <tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{...}\n</tool_calls>
hunyuan_a13b     <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>     Hunyuan; also a tag for each call
apertus          <|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>                   Apertus
command_a        <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>
json             [{"name": "f", "parameters": {"a": 1}}]                             any template without a format
command_r        Action:\n```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```  Command-R
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.parsers.family import CallFamily, Tools, decoded, object_text
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, marker, object_schema
from engine.parsers.reader import Malformed, Reader, Reading

_LINE = re.compile(r"[^\n<]*")
_FENCE = "```json"
_NUMBERED = " ".join((literal('{"tool_call_id": "'), "/[0-9]{1,2}/", literal('", ')))


class JsonCalls(CallFamily):
    """`begin`, `end`: the markers around calls. `others`: further markers before calls, with their own ends."""

    def __init__(
        self,
        name: str,
        begin: str,
        end: str = "",
        *,
        is_list: bool = True,
        before: str = "[",
        between: str = ", ",
        after: str = "]",
        name_key: str = "name",
        arguments_key: str = "arguments",
        head: str = "",
        others: Mapping[str, str] | None = None,
    ) -> None:
        """`before`, `between`, `after`: text around the objects, as a grammar writes it. `name_key`: of an object; empty: the
        function's name is the key of its arguments. `head`: Lark of the first members of an object."""
        self.name = name
        self.ends = {begin: end, **(others or {})}
        self.triggers = tuple(self.ends)
        self.markers = tuple(dict.fromkeys(end for end in self.ends.values() if end))
        self._is_list = is_list
        self._before, self._between, self._after = before, between, after
        self._name_key, self._arguments_key = name_key, arguments_key
        self._head = head or literal("{")

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        if not self._is_list:
            call = self._call((yield from reader.json()))
            yield from self._end(reader, self.ends[trigger])
            reader.complete(*call)
            return
        if _FENCE in self._before:
            yield from reader.literal(_FENCE)
            yield from reader.space()
        if (yield from reader.peek()) == "{":  # without a list
            while True:
                reader.complete(*self._call((yield from reader.json())))
                yield from reader.space()
                if (yield from reader.has_ended()) or (yield from reader.peek()) != "{":
                    break
        else:
            yield from reader.literal("[")
            separator = ","
            while separator == ",":
                yield from reader.space()
                reader.complete(*self._call((yield from reader.json())))
                yield from reader.space()
                separator = yield from reader.one_of(",", "]")
        yield from self._end(reader, self.ends[trigger])

    def _end(self, reader: Reader, end: str) -> Reading[None]:
        if end:
            yield from reader.space()
            yield from reader.last_literal(end)

    def _call(self, text: str) -> tuple[str, str]:
        """Return name and arguments of an object. Raises Malformed."""
        members: dict[str, msgspec.Raw] = decoded(text, dict[str, msgspec.Raw])
        if not self._name_key:
            if len(members) != 1:
                raise Malformed
            ((name, arguments),) = members.items()
            return name, object_text(bytes(arguments).decode())
        name = decoded(bytes(members.get(self._name_key, b"")).decode(), str)
        found = members.get("arguments") or members.get("parameters") or b"{}"
        return name, object_text(bytes(found).decode())

    def write(self, calls: list[tuple[str, Any]]) -> str:
        if not self._name_key or self._head != literal("{"):
            return super().write(calls)
        texts = [json.dumps({self._name_key: name, self._arguments_key: given}, ensure_ascii=False) for name, given in calls]
        begin, end = self.triggers[0], self.ends[self.triggers[0]]
        if self._is_list:
            return f"{begin}{self._before}{self._between.join(texts)}{self._after}{end}"
        return "\n".join(f"{begin}{self._before}{text}{self._after}{end}" for text in texts)

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        if not self._is_list:
            return "", literal("\n"), ""
        begin, end = self.triggers[0], self.ends[self.triggers[0]]
        after = f"{literal(self._after)} {marker(end, id_of) if end else ''}"
        return f"{marker(begin, id_of)} {literal(self._before)}", literal(self._between), after

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        arguments = json_rule(object_schema(parameters), strict)
        if self._name_key:
            key = f'"{self._name_key}": {json.dumps(name)}, "{self._arguments_key}": '
        else:
            key = f"{json.dumps(name)}: "
        call = f"{self._head} {literal(key)} {arguments} {literal('}')}"
        if self._is_list:
            return call
        trigger = self.triggers[0]
        begin, end = marker(trigger, id_of), marker(self.ends[trigger], id_of)
        return f"{begin} {literal(self._before)} {call} {literal(self._after)} {end}"


class Hunyuan(JsonCalls):
    r"""A list, or for each call a tag with a fence of Markdown: <tool_call>f\n```json\n{"a": 1}\n```\n</tool_call>."""

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        if (yield from reader.peek()) != "<":
            yield from super().read(reader, trigger, tools)
            return
        while (yield from reader.one_of("<tool_call>", "</tool_calls>")) == "<tool_call>":
            name = yield from reader.name(_LINE)
            yield from reader.space()
            yield from reader.literal(_FENCE)
            yield from reader.space()
            arguments = object_text((yield from reader.json()))
            yield from reader.space()
            yield from reader.literal("```")
            yield from reader.space()
            yield from reader.literal("</tool_call>")
            reader.complete(name.strip(), arguments)
            yield from reader.space()
            if (yield from reader.has_ended()):
                return


class BareJson(JsonCalls):
    """For templates that show no format: only calls that a grammar forces are read, from the beginning of the answer."""

    openings = "[{"

    def __init__(self) -> None:
        super().__init__("json", "", arguments_key="parameters")
        self.triggers = ()

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        return literal("["), literal(", "), literal("]")

    def write(self, calls: list[tuple[str, Any]]) -> str:
        return json.dumps([{"name": name, "parameters": given} for name, given in calls], ensure_ascii=False)


FAMILIES = (
    BareJson(),
    JsonCalls("hermes", "<tool_call>", "</tool_call>", is_list=False, before="\n", after="\n"),
    JsonCalls("ernie45", "<tool_call>", "</tool_call>", is_list=False, before="\n", after="\n"),
    JsonCalls("granite", "<|tool_call|>", others={"<tool_call>": ""}),
    JsonCalls("phi4_mini_json", "functools", others={"<|tool_call|>": "<|/tool_call|>"}),
    JsonCalls("minimax_m1", "<tool_calls>", "</tool_calls>", before="\n", between="\n", after="\n"),
    JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    Hunyuan("hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
    JsonCalls("apertus", "<|tools_prefix|>", "<|tools_suffix|>", name_key=""),
    JsonCalls(
        "command_a",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        before="[\n    ",
        between=",\n    ",
        after="\n]",
        name_key="tool_name",
        arguments_key="parameters",
        head=_NUMBERED,
    ),
    JsonCalls(
        "command_r",
        "Action:",
        "```",
        before=f"\n{_FENCE}\n[\n    ",
        between=",\n    ",
        after="\n]\n",
        name_key="tool_name",
        arguments_key="parameters",
    ),
)
