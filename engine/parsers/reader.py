"""Reads a call that arrives in pieces: each character once, keeping the text that is not parsed yet.

Used by the families. A family is a generator in straight-line code that yields when it needs more text, and raises `Malformed`
if the text is no call, or if the answer ends within it. All work is linear in the text: nothing is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_NAME_CHARACTERS = 256
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = re.compile(r"[\s,:0-9A-Za-z+\-.]*")  # parts of JSON other than strings and brackets
_BEFORE_VALUES = ("", "{", "[", ",", ":")


class Malformed(Exception):
    """The text is no call, and stays content."""


class FoundCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON text of an object
    id: str = ""  # the model's own


class Reader:
    def __init__(self, opening: str, names: frozenset[str] = frozenset()) -> None:
        """`opening`: already read text of the call. `names`: functions that may be called; none: any."""
        self._names = names
        self.calls: list[FoundCall] = []  # complete and not taken yet
        self.section = ""  # "content" or "reasoning": what begins behind the text read
        self.num_opening = len(opening)  # characters of `raw`
        self._raw = [opening]  # read since the last complete call, except the current part of `_text`
        self._text = ""
        self._raw_begin = 0  # in `_text`
        self._place = 0
        self._has_ended = False

    def end(self) -> None:
        """End the answer: no more text follows."""
        self._has_ended = True

    def feed(self, text: str) -> None:
        """Take the next piece; the previous one was read to its end."""
        self._raw.append(self._text[self._raw_begin :])
        self._text, self._raw_begin, self._place = text, 0, 0

    @property
    def raw(self) -> str:
        """Text read since the last complete call."""
        return "".join(self._raw) + self._text[self._raw_begin : self._place]

    @property
    def raw_before(self) -> str:
        """Part of `raw` that was read before the last piece."""
        return "".join(self._raw)

    @property
    def unread(self) -> str:
        return self._text[self._place :]

    def complete(self, name: str, arguments: str, call_id: str = "") -> None:
        """Record a complete call, up to the last character read."""
        if self._names and name not in self._names:
            raise Malformed
        self.calls.append(FoundCall(name, arguments, call_id))
        self.num_opening = 0
        self._raw.clear()
        self._raw_begin = self._place

    # ------------------------------------------------------------------------------------------------ for the families

    def peek(self) -> Reading[str]:
        """Return the next character without taking it."""
        if (yield from self.has_ended()):
            raise Malformed
        return self._text[self._place]

    def has_ended(self) -> Reading[bool]:
        """Return whether the answer ends here."""
        while self._place == len(self._text):
            if self._has_ended:
                return True
            yield
        return False

    def run(self, pattern: re.Pattern[str], max_characters: int = 1 << 30) -> Reading[str]:
        """Read everything that matches `pattern`, a repeated character class; the next character or the answer's end stays."""
        parts: list[str] = []
        num_characters = 0
        while True:
            match = pattern.match(self._text, self._place, self._place + max_characters + 1 - num_characters)
            assert match is not None
            parts.append(match[0])
            num_characters += len(match[0])
            self._place = match.end()
            if num_characters > max_characters:
                raise Malformed
            if self._place < len(self._text) or self._has_ended:
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        return self.run(_SPACE)

    def literal(self, expected: str) -> Reading[None]:
        for character in expected:
            if (yield from self.peek()) != character:
                raise Malformed
            self._place += 1

    def last_literal(self, expected: str) -> Reading[None]:
        """Read what ends the calls of an answer: models leave it out, or a part of it, at the end of the answer."""
        for character in expected:
            if (yield from self.has_ended()):
                return
            if self._text[self._place] != character:
                raise Malformed
            self._place += 1

    def one_of(self, *expected: str) -> Reading[str]:
        """Read the one of `expected` that comes next; none of them begins with another."""
        found, _ = yield from self.if_one_of(*expected)
        if not found:
            raise Malformed
        return found

    def if_one_of(self, *expected: str) -> Reading[tuple[str, str]]:
        """Read the one of `expected` that comes next. Return it (empty: none comes next) and the text read."""
        place = 0
        read = ""
        while not (yield from self.has_ended()):
            character = self._text[self._place]
            expected = tuple(text for text in expected if text[place] == character)
            if not expected:
                return "", read
            self._place += 1
            place += 1
            read = expected[0][:place]
            if len(read) == len(expected[0]):
                return read, read
        return "", read

    def name(self, pattern: re.Pattern[str]) -> Reading[str]:
        name = yield from self.run(pattern, MAX_NAME_CHARACTERS)
        if not name:
            raise Malformed
        return name

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Read up to and including the first of `marks`; return the text before it, and the mark."""
        parts: list[str] = []
        tail = ""  # end of the text that may begin a mark
        while True:
            yield from self.peek()
            text = tail + self._text[self._place :]
            places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
            if places:
                place, mark = min(places)
                self._place += place + len(mark) - len(tail)
                parts.append(text[:place])
                return "".join(parts), mark
            num_held = num_beginning(text, *marks)
            parts.append(text[: len(text) - num_held])
            tail = text[len(text) - num_held :]
            self._place = len(self._text)

    def json(self, begun: str = "") -> Reading[str]:
        """Read the text of a JSON object or list, with balanced brackets and values only where one may begin; a decoder checks
        the rest. `begun`: beginning of an object that was already read. Text that cannot belong to it is not read."""
        parts = [begun]
        open_brackets = ["}"] if begun else []
        before = begun[-1:]  # its last character other than space
        if begun:
            before = yield from self._between(parts, before)
        while True:
            character = yield from self.peek()
            is_value = character in "{[" or (character == '"' and bool(open_brackets))
            if is_value and before not in _BEFORE_VALUES:
                raise Malformed
            if not is_value and character not in open_brackets[-1:]:
                raise Malformed
            parts.append(character)
            self._place += 1
            if character == '"':
                yield from self._string(parts)
            elif is_value:
                open_brackets.append("}" if character == "{" else "]")
            else:
                open_brackets.pop()
            if not open_brackets:
                return "".join(parts)
            before = yield from self._between(parts, character)

    def _between(self, parts: list[str], before: str) -> Reading[str]:
        """Return the text between strings and brackets, and its last character other than space (`before` if there is none)."""
        between = yield from self.run(_BETWEEN)
        parts.append(between)
        return between.rstrip()[-1:] or before

    def _string(self, parts: list[str]) -> Reading[None]:
        """Read up to the closing quote; the opening one was read."""
        while True:
            parts.append((yield from self.run(_STRING)))
            character = yield from self.peek()
            if character not in '"\\':
                raise Malformed
            parts.append(character)
            self._place += 1
            if character == '"':
                return
            parts.append((yield from self.peek()))
            self._place += 1


def num_beginning(text: str, *marks: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
