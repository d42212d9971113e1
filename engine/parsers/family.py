"""Tool-call format of a family of models, and the tools of a request."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from engine.messages import Parsing
from engine.parsers.grammar import ANY_TEXT, Lark, MarkerIds, json_rule, literal, marker, nested, object_schema
from engine.parsers.reader import Malformed, Reader, Reading
from shm.blake2 import blake2b

_SPACE = r"\s\x1c-\x1f"  # as in `str.isspace`


class _Function(msgspec.Struct):
    name: str
    parameters: Any = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function


class Tools:
    """The functions of a request, by name, with the JSON Schema of their parameters."""

    def __init__(self, functions: dict[str, dict[str, Any]], strict: frozenset[str] = frozenset()) -> None:
        self.functions = functions
        self.strict = strict

    @staticmethod
    def of(tools: bytes) -> Tools:
        """Read the JSON list of a request; entries that are not functions are skipped."""
        return _read_tools(tools)


@lru_cache(maxsize=4)
def _read_tools(tools: bytes) -> Tools:
    """Read the tools once for the sequences of a request."""
    try:
        found = msgspec.json.decode(tools, type=list[_Tool])
    except (msgspec.MsgspecError, RecursionError):
        return Tools({})
    schemas = {tool.function.name: tool.function.parameters for tool in found}
    return Tools(
        {name: schema if isinstance(schema, dict) else {} for name, schema in schemas.items()},
        frozenset(tool.function.name for tool in found if tool.function.strict),
    )


class CallFamily(ABC):
    """How a family of models writes tool calls."""

    name: str
    triggers: tuple[str, ...] = ()  # markers that begin a call
    openings: str = ""  # characters that may begin an answer with a call, if no marker is needed
    markers: tuple[str, ...] = ()  # further markers, inside calls
    template_marks: tuple[str, ...] = ()  # of a plugin: it is chosen for a chat template that has all of them
    has_sections = False  # it reads reasoning and content, too (`Reader.section`), and takes the place of a `ThinkingFamily`
    ends: Mapping[str, str] = {}  # by trigger, the marker after its calls, for families with calls that need no marker

    @abstractmethod
    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        """Read all consecutive calls after `trigger` (or from the opening character on)."""

    @abstractmethod
    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        """Return the body of the rule `rule`: a call of the function `name`."""

    def call_beside(self, format_lark: str, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
        """Return the rule of a call beside a structured answer that may begin the same way; empty: use `call_rule`."""
        return ""

    def write(self, calls: list[tuple[str, Any]]) -> str:
        """Return calls as the model writes them, for chat templates that show none."""
        return json_lines(calls)

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        """Return the text before the first call, between two, and after the last."""
        return "", literal("\n"), ""

    def grammar(self, tools: Tools, parsing: Parsing, id_of: MarkerIds, free: Sequence[str] = (), format_lark: str = "") -> str:
        """Return Lark, in llguidance's dialect, for calls in the family's format, according to `parsing.choice`. "auto": any
        text with `free` markers, and after the beginning of a call a complete call, with the exact parameters of a strict
        function. With `format_lark`, the Lark of a structured answer, "auto" is calls or that answer, and no other text."""
        lark = Lark()
        is_forced = parsing.choice != "auto"
        rules = []
        for index, name in enumerate(parsing.names or tools.functions):
            is_strict = name in tools.strict
            parameters = tools.functions.get(name, {}) if is_forced or is_strict or format_lark else {}
            rule = self.call_beside(format_lark, name, parameters, is_strict) if format_lark else ""
            rule = rule or self.call_rule(lark, f"call{index}", name, parameters, id_of, is_strict)
            rules.append(lark.add(f"call{index}", rule))
        call = lark.one_of("call", rules)
        before, between, after = self.frame(id_of)
        more = f" ({between} {call})*" if parsing.is_parallel and parsing.choice != "named" else ""
        calls = lark.add("calls", f"{before} {call}{more} {after}")
        if is_forced:
            return lark.with_start(calls)
        if format_lark:
            lark.add("SPACE", r"/\n{1,2}/")  # few: a model that may write space forever does so
            marked = self._marked(calls, id_of) if self.openings else []
            return lark.with_start(f"SPACE? {lark.one_of('any_calls', [calls, *marked])} | {nested(format_lark)}")
        if self.openings:
            lark.add("SPACE", f"/[{_SPACE}]+/")
            lark.add("TEXT", f"/(?s:[{_SPACE}]*[^{_SPACE}{re.escape(self.openings)}].*)/")
            lark.add("REST", ANY_TEXT)
            thought = [marker(text, id_of) for text in free if id_of(text) is not None]
            before = f"({thought[0]} REST {thought[1]})? " if len(thought) == 2 else ""
            marked = [f"{each} REST" for each in self._marked(calls, id_of)]
            after = f" ({lark.one_of('marked', marked)})*" if marked else ""
            return lark.with_start(f"{before}SPACE? ({calls} | TEXT)?{after}")
        lark.add("TEXT", ANY_TEXT)
        trigger = self.triggers[0]
        if id_of(trigger) is None:  # any text up to the first trigger; the rest is constrained
            lark.add("head", f"TEXT {literal(trigger)}", options="[lazy]")
            return lark.with_start(f"{calls}* TEXT").replace(f": {literal(trigger)}", ": head")
        marks = [marker(text, id_of) for text in free if id_of(text) is not None]
        lark.one_of("text", ["TEXT", *(f"text {mark} text" for mark in marks)])
        return lark.with_start(f"text ({calls} text)*")

    def framed(self, format_lark: str, parsing: Parsing | None, id_of: MarkerIds) -> str:
        """Return Lark of an answer with a structured text of `format_lark`."""
        return format_lark

    def _marked(self, calls: str, id_of: MarkerIds) -> list[str]:
        """Return calls between the markers that the vocabulary has, for families that need none."""
        own = [text for text in self.triggers if id_of(text) is not None]
        ends = [marker(self.ends[text], id_of) if text in self.ends else "" for text in own]
        return [f"{marker(text, id_of)} SPACE? {calls} {end}" for text, end in zip(own, ends, strict=True)]

    def call_id(self, request_id: str, index: int) -> str:
        """Return an id that is the same after every crash."""
        return f"call_{digest(request_id, index, 12)}"


def digest(request_id: str, index: int, num_bytes: int) -> str:
    return blake2b(f"{request_id}#{index}".encode(), digest_size=num_bytes).hexdigest()


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def named_call(text: str) -> tuple[str, str]:
    """Return name and arguments of a call that is one JSON object. Raises Malformed."""
    call = decoded(text, _Call)
    return call.name, object_text(bytes(call.arguments or call.parameters or b"{}").decode())


def object_text(text: str) -> str:
    """Return the JSON text of an object, given directly or inside a string. Raises Malformed."""
    if text.startswith('"'):
        text = decoded(text, str)
    decoded(text, dict[str, msgspec.Raw])
    return text


def json_lines(calls: list[tuple[str, Any]]) -> str:
    """Return calls, with objects or texts as arguments, as lines of JSON."""
    return "\n".join(json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)


def json_object(values: Mapping[str, str]) -> str:
    """Return the JSON text of an object with values given as JSON text."""
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in values.items())}}}"


def decoded(text: str, type_: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=type_)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise Malformed from error


def json_call(name: str, key: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Return the grammar of a call that is one JSON object, with the parameters under `key`."""
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f"{literal(head)} {json_rule(object_schema(parameters), strict)} {literal('}')}"
