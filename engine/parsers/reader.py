"""Reads a call that arrives in pieces: each character once, keeping the text that is not parsed yet.

Used by the families. A family is a generator in straight-line code that yields when it needs more text, and raises `Malformed`
if the text is no call. All work is linear in the text: nothing is read twice.
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


class Reader:
    def __init__(self, opening: str, names: frozenset[str] = frozenset()) -> None:
        """`opening`: already read text of the call. `names`: functions that may be called; none: any."""
        self._names = names
        self.calls: list[FoundCall] = []  # complete and not taken yet
        self.num_opening = len(opening)  # characters of `raw`
        self._raw = [opening]  # read since the last complete call, except the current part of `_text`
        self._text = ""
        self._raw_begin = 0  # in `_text`
        self._place = 0

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

    def complete(self, name: str, arguments: str) -> None:
        """Record a complete call, up to the last character read."""
        if self._names and name not in self._names:
            raise Malformed
        self.calls.append(FoundCall(name, arguments))
        self.num_opening = 0
        self._raw.clear()
        self._raw_begin = self._place

    # ------------------------------------------------------------------------------------------------ for the families

    def peek(self) -> Reading[str]:
        """Return the next character without taking it."""
        while self._place == len(self._text):
            yield
        return self._text[self._place]

    def run(self, pattern: re.Pattern[str], max_characters: int = 1 << 30) -> Reading[str]:
        """Read everything that matches `pattern`, a repeated character class; the next character stays."""
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
            if self._place < len(self._text):
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        return self.run(_SPACE)

    def literal(self, expected: str) -> Reading[None]:
        for character in expected:
            if (yield from self.peek()) != character:
                raise Malformed
            self._place += 1

    def one_of(self, *expected: str) -> Reading[str]:
        """Read the one of `expected` that comes next; no two of them begin with the same character."""
        first = yield from self.peek()
        for text in expected:
            if text[0] == first:
                yield from self.literal(text)
                return text
        raise Malformed

    def name(self, pattern: re.Pattern[str]) -> Reading[str]:
        name = yield from self.run(pattern, MAX_NAME_CHARACTERS)
        if not name:
            raise Malformed
        return name

    def until(self, mark: str) -> Reading[str]:
        """Read up to and including `mark`; return the text before it."""
        parts: list[str] = []
        tail = ""  # end of the text that may begin `mark`
        while True:
            if self._place == len(self._text):
                yield
                continue
            text = tail + self._text[self._place :]
            place = text.find(mark)
            if place >= 0:
                self._place += place + len(mark) - len(tail)
                parts.append(text[:place])
                return "".join(parts)
            num_held = num_beginning(text, mark)
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
