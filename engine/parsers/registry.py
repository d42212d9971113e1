"""The parsers of one engine: its families, and their markers in its vocabulary.

Families and their parsers are imported if an engine uses them, or when a request first needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import ChatPrompt, Parsing, Prompt
from engine.parsers.choice import CALL_PARSERS
from engine.parsers.thinking import THINKING_FAMILIES

if TYPE_CHECKING:
    from engine.parsers.answer_parser import AnswerParser
    from engine.parsers.family import CallFamily


def call_family(name: str) -> CallFamily:
    """Return one of `CALL_PARSERS`."""
    place = CALL_PARSERS[name]
    if not isinstance(place, str):
        return place
    families: tuple[CallFamily, ...] = import_module(f"engine.parsers.{place}").FAMILIES
    return next(family for family in families if family.name == name)


class _Said(msgspec.Struct):
    content: Any = None


class Parsers:
    """The parsers; one object per tokenizer."""

    def __init__(self, family: str, thinking: str, pieces: Sequence[str | None]) -> None:
        """`family`, `thinking`: names of families, or "none". `pieces`: of the vocabulary, by token id."""
        self.call_family = call_family(family) if family in CALL_PARSERS else None
        self.thinking = THINKING_FAMILIES.get(thinking)
        reader = call_family(self.thinking.call_family) if self.thinking and self.thinking.call_family else self.call_family
        self._sections = reader if reader and reader.has_sections else None
        markers: set[str] = set()
        for each in filter(None, (self.call_family, self._sections)):
            markers |= {*each.triggers, *each.markers}
        if self.thinking:
            markers |= {self.thinking.begin, self.thinking.end, *self.thinking.wrappers}
        self.marker_of_id = {token_id: piece for token_id, piece in enumerate(pieces) if piece in markers} if markers else {}
        self._id_of_marker = {marker: token_id for token_id, marker in self.marker_of_id.items()}

    def id_of(self, marker: str) -> int | None:
        return self._id_of_marker.get(marker)

    def write_calls(self, calls: list[dict[str, Any]]) -> str:
        """Return calls of a message as the model writes them, for a chat template that shows none."""
        from engine.parsers.family import json_lines

        functions = [call["function"] for call in calls]
        given = [(str(function.get("name")), function["arguments"]) for function in functions]
        if self.call_family is None or not all(isinstance(arguments, dict) for _, arguments in given):
            return json_lines(given)
        return self.call_family.write(given)

    def finds_reasoning(self, parsing: Parsing | None) -> bool:
        """Return whether the answers of a request are searched for reasoning."""
        return parsing is not None and parsing.finds_reasoning and self.thinking is not None

    def begins_thinking(self, parsing: Parsing | None, prompt: object, prompt_end: str) -> bool:
        """Return whether an answer begins inside reasoning, judging by the end of the prompt or by a final message that it
        continues."""
        if parsing is None or not parsing.finds_reasoning or self.thinking is None:
            return False
        if prompt_end.rstrip().endswith(self.thinking.begin):
            return True
        if not isinstance(prompt, ChatPrompt) or not prompt.continue_final_message:
            return False
        said = msgspec.json.decode(prompt.messages, type=list[_Said])[-1].content
        return isinstance(said, str) and said.rfind(self.thinking.begin) > said.rfind(self.thinking.end)

    def grammar(self, parsing: Parsing, tools: bytes, format_lark: str = "") -> str:
        """Return Lark for calls that are required, or that may replace an answer of `format_lark`; empty: nothing is
        constrained."""
        if self.call_family is None or not (parsing.binds or (format_lark and parsing.finds_calls and tools)):
            return ""
        from engine.parsers.family import Tools

        marks = (self.thinking.begin, self.thinking.end) if self.thinking else ()
        return self.call_family.grammar(Tools.of(tools), parsing, self.id_of, marks, format_lark)

    def framed(self, format_lark: str, parsing: Parsing | None) -> str:
        """Return Lark of a whole answer with a structured text of `format_lark`."""
        return self._sections.framed(format_lark, parsing, self.id_of) if self._sections else format_lark

    def parser_for(self, parsing: Parsing | None, prompt: Prompt, request_id: str, is_thinking: bool) -> AnswerParser | None:
        """Return the parser of a sequence's answer; None: it is only content. `is_thinking`: it begins inside reasoning."""
        if parsing is None or not isinstance(prompt, ChatPrompt):
            return None
        family = self.call_family if parsing.finds_calls and not parsing.leaves_calls and prompt.tools else None
        thinking = self.thinking if parsing.finds_reasoning and not parsing.leaves_reasoning else None
        tools = prompt.tools if family else b""
        shows_reasoning = thinking is not None
        if self._sections is not None:
            family, thinking = family or self._sections, None
        if family is None and thinking is None:
            return None
        from engine.parsers.answer_parser import AnswerParser
        from engine.parsers.family import Tools

        return AnswerParser(
            call_family=family,
            thinking=thinking,
            tools=partial(Tools.of, tools),
            names=frozenset(parsing.names),
            token_markers=frozenset(self._id_of_marker),
            begins_thinking=is_thinking and thinking is not None,
            request_id=request_id,
            is_parallel=parsing.is_parallel,
            has_thinking_budget=parsing.thinking_token_budget >= 0,
            must_begin=parsing.has_format,
            shows_reasoning=shows_reasoning,
        )
