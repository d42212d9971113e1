"""gpt-oss: an answer is a row of messages, each with a channel and perhaps a recipient in its head.

    <|channel|>analysis<|message|>I reason.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

The recipient may also precede the channel. "analysis" is reasoning; other messages without a recipient are content. The prompt
ends with "<|start|>assistant"; the last mark ends the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.messages import Parsing
from engine.parsers.family import CallFamily, Tools, object_text
from engine.parsers.grammar import ANY_TEXT, Lark, MarkerIds, json_rule, literal, marker, nested, object_schema
from engine.parsers.reader import MAX_NAME_CHARACTERS, Malformed, Reader, Reading

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
REASONING, CHANNELS = "analysis", ("analysis", "commentary", "final")
TO, FUNCTIONS = "to=", "functions."
_CHANNEL = re.compile(r"[a-z]*")
_WORD = re.compile(r"[^<\s]*")
_BLANKS = re.compile(r"[ ]*")


class Harmony(CallFamily):
    name = "harmony"
    triggers = (CHANNEL, START, END, CALL, RETURN)
    markers = (MESSAGE, CONSTRAIN)
    openings = "t"  # a recipient right after the prompt
    has_sections = True

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        reader.section = "content"
        if trigger in (END, CALL, RETURN):
            return
        recipient = ""
        if trigger != CHANNEL:
            if trigger == START:
                yield from reader.literal("assistant")
            recipient = yield from self._head(reader, CHANNEL)
        channel = yield from reader.name(_CHANNEL)
        recipient = (yield from self._head(reader, MESSAGE)) or recipient
        if channel not in CHANNELS:
            raise Malformed
        if not recipient:
            reader.section = "reasoning" if channel == REASONING else "content"
            return
        if not tools.functions:
            raise Malformed
        yield from reader.space()
        is_empty = (yield from reader.peek()) == "<"
        arguments = "{}" if is_empty else object_text((yield from reader.json()))
        reader.complete(recipient.removeprefix(FUNCTIONS), arguments)

    def _head(self, reader: Reader, end: str) -> Reading[str]:
        """Read words up to the marker `end`; return the recipient among them."""
        recipient = ""
        while True:
            yield from reader.run(_BLANKS, MAX_NAME_CHARACTERS)
            if (yield from reader.peek()) == "<":
                if (yield from reader.one_of(end, CONSTRAIN)) == end:
                    return recipient
            else:
                word = yield from reader.name(_WORD)
                recipient = word.removeprefix(TO) if word.startswith(TO) else recipient

    # ------------------------------------------------------------------------------------------------------------ grammar

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        """Return one call; the mark behind it ends the answer."""
        channel, constrain, message = (marker(text, id_of) for text in (CHANNEL, CONSTRAIN, MESSAGE))
        head = f"{channel} {literal(f'commentary {TO}{FUNCTIONS}{name} ')} {constrain} {literal('json')} {message}"
        return f"{head} {json_rule(object_schema(parameters), strict)}"

    def grammar(self, tools: Tools, parsing: Parsing, id_of: MarkerIds, free: Sequence[str] = (), format_lark: str = "") -> str:
        """Return Lark as in the base class: reasoning, then messages to the user, then a call or a last message."""
        lark = Lark()
        is_forced = parsing.choice != "auto"
        rules = []
        for index, name in enumerate(parsing.names or tools.functions):
            is_strict = name in tools.strict
            parameters = tools.functions.get(name, {}) if is_forced or is_strict or format_lark else {}
            rules.append(lark.add(f"call{index}", self.call_rule(lark, f"call{index}", name, parameters, id_of, is_strict)))
        call = lark.one_of("call", rules)
        before = self._messages(lark, id_of, parsing.thinking_token_budget)
        if is_forced:
            return lark.with_start(f"{before} {call}")
        return lark.with_start(f"{before} ({call} | {self._last(lark, id_of, format_lark)})")

    def framed(self, format_lark: str, parsing: Parsing | None, id_of: MarkerIds) -> str:
        lark = Lark()
        budget = parsing.thinking_token_budget if parsing else -1
        return lark.with_start(f"{self._messages(lark, id_of, budget)} {self._last(lark, id_of, format_lark)}")

    def _messages(self, lark: Lark, id_of: MarkerIds, budget: int) -> str:
        """Return Lark of the messages before the last one. `budget`: most tokens of reasoning; -1: no limit."""
        channel, message, end, start = (marker(text, id_of) for text in (CHANNEL, MESSAGE, END, START))
        next_ = f"{start} {literal('assistant')}"
        options = [f"max_tokens={budget}"] if budget > 0 else []
        if id_of(END) is None:
            options.append(f"suffix={literal(END)}")
            end = ""
        lark.add("thoughts", ANY_TEXT, options=f"[{', '.join(options)}]" if options else "")
        lark.add("words", ANY_TEXT, options=f"[suffix={literal(END)}]" if not end else "")
        lark.add("thinking", f"{channel} {literal(REASONING)} {message} thoughts {end} {next_}")
        lark.add("saying", f"{channel} {literal('commentary')} {message} words {end} {next_}")
        return "thinking? saying*" if budget else "saying*"

    def _last(self, lark: Lark, id_of: MarkerIds, format_lark: str) -> str:
        channel, message = (marker(text, id_of) for text in (CHANNEL, MESSAGE))
        lark.add("TEXT", ANY_TEXT)
        return f"{channel} {literal('final')} {message} {nested(format_lark) if format_lark else 'TEXT'}"


FAMILIES = (Harmony(),)
