"""Reads Python literals in calls and returns them as JSON text.

Used by `pythonic.py`, and by formats with values as Python prints them. Whatever Python reads as a string, number, list,
tuple or dictionary is read; everything else is malformed.
"""

from __future__ import annotations

import re
import unicodedata

import orjson

from engine.parsers.family import decoded
from engine.parsers.reader import Malformed, Reader, Reading

MAX_DEPTH = 64  # of nested lists and dictionaries
MAX_NAME_CHARACTERS = 100  # of a character

_WORD = re.compile(r"[-+.\w]*")
_HEX = re.compile(r"[0-9A-Fa-f]")
_OCTAL = re.compile(r"[0-7]")
_CHARACTER_NAME = re.compile(r"[^}\n]*")
_QUOTES = "\"'"
_TEXT = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""} | {
    character: character for character in "\\'\""
}
_CODES = {"x": 2, "u": 4, "U": 8}
_DIGITS = r"[0-9](?:_?[0-9])*"
_INTEGER = re.compile(
    r"[-+]?(?:0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+|[1-9](?:_?[0-9])*|0(?:_?0)*)", re.ASCII
)
_FLOAT = re.compile(rf"([-+]?)((?:{_DIGITS})?)\.?((?:{_DIGITS})?)([eE][-+]?{_DIGITS})?", re.ASCII)
_PREFIXES = ("r", "u")  # of strings


def python_value(text: str) -> str | None:
    """Return a literal as JSON text; None: it is none."""
    reader = Reader("")
    reader.feed(text)
    reader.end()
    reading = _whole(reader)
    try:
        next(reading)
    except StopIteration as end:
        return str(end.value)
    except Malformed:
        return None
    raise AssertionError("a reading of an ended text waits for more")


def _whole(reader: Reader) -> Reading[str]:
    value = yield from read_value(reader)
    yield from reader.space()
    if not (yield from reader.has_ended()):
        raise Malformed
    return value


def read_value(reader: Reader, depth: int = MAX_DEPTH) -> Reading[str]:
    """Read a literal with the space before it; return JSON text."""
    yield from reader.space()
    first = yield from reader.peek()
    if not depth:
        raise Malformed
    if first in "[(":
        return (yield from _items(reader, first, "]" if first == "[" else ")", depth))
    if first == "{":
        return (yield from _members(reader, depth))
    return (yield from _scalar(reader))


def _scalar(reader: Reader) -> Reading[str]:
    """Read a string, a number or a constant."""
    word = yield from reader.run(_WORD)
    if not (yield from reader.has_ended()) and (yield from reader.peek()) in _QUOTES:
        return (yield from _strings(reader, word))
    return _WORDS.get(word) or _number(word)


def _number(word: str) -> str:
    """Return a number as JSON text. Raises Malformed."""
    try:
        decoded(word, float)
    except Malformed:
        pass
    else:
        return word
    if _INTEGER.fullmatch(word):
        try:
            return str(int(word, 0))
        except ValueError:  # more digits than Python converts
            raise Malformed from None
    match = _FLOAT.fullmatch(word)
    if match is None or not (match[2] or match[3]) or not ("." in word or match[4]):
        raise Malformed
    whole = match[2].replace("_", "").lstrip("0") or "0"
    text = f"{match[1].strip('+')}{whole}.{match[3] or '0'}{match[4] or ''}".replace("_", "")
    decoded(text, float)
    return text


def _items(reader: Reader, begin: str, end: str, depth: int) -> Reading[str]:
    """Read a list, a tuple, or a value in brackets."""
    items: list[str] = []
    has_comma = False
    yield from reader.literal(begin)
    yield from reader.space()
    while (yield from reader.peek()) != end:
        items.append((yield from read_value(reader, depth - 1)))
        has_comma = yield from _separator(reader, end)
    yield from reader.literal(end)
    if begin == "(" and len(items) == 1 and not has_comma:
        return items[0]
    return f"[{', '.join(items)}]"


def _members(reader: Reader, depth: int) -> Reading[str]:
    """Read a dictionary. Keys that are no strings become strings, as with Python's `json`."""
    members: list[str] = []
    yield from reader.literal("{")
    yield from reader.space()
    while (yield from reader.peek()) != "}":
        key = yield from _scalar(reader)
        yield from reader.space()
        yield from reader.literal(":")
        value = yield from read_value(reader, depth - 1)
        members.append(f"{key if key.startswith(_QUOTES[0]) else _quoted(key)}: {value}")
        yield from _separator(reader, "}")
    yield from reader.literal("}")
    return f"{{{', '.join(members)}}}"


def _separator(reader: Reader, end: str) -> Reading[bool]:
    """Read a comma, unless `end` follows; return whether one was read."""
    yield from reader.space()
    if (yield from reader.peek()) == end:
        return False
    yield from reader.literal(",")
    yield from reader.space()
    return True


def _strings(reader: Reader, prefix: str) -> Reading[str]:
    """Read a string, and those that follow it immediately, which Python joins. `prefix` was read."""
    parts: list[str] = []
    while True:
        if prefix and prefix.lower() not in _PREFIXES:
            raise Malformed
        yield from _string(reader, parts, is_raw=prefix.lower() == "r")
        yield from reader.space()
        if (yield from reader.has_ended()):
            break
        following = yield from reader.peek()
        if following not in _QUOTES and following.lower() not in _PREFIXES:
            break
        prefix = yield from reader.run(_WORD)
        if (yield from reader.peek()) not in _QUOTES:
            raise Malformed
    text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # surrogate pairs become characters
    return _quoted(text)


def _string(reader: Reader, parts: list[str], is_raw: bool) -> Reading[None]:
    quote = yield from reader.one_of(*_QUOTES)
    num_quotes = 1
    while num_quotes < 3 and not (yield from reader.has_ended()) and (yield from reader.peek()) == quote:
        yield from reader.literal(quote)
        num_quotes += 1
    if num_quotes == 2:
        return
    while True:
        parts.append((yield from reader.run(_TEXT[quote])))
        if (yield from reader.one_of(quote, "\\")) == "\\":
            parts.append((yield from _escaped(reader, is_raw)))
            continue
        num_ends = 1
        while num_ends < num_quotes and (yield from reader.peek()) == quote:
            yield from reader.literal(quote)
            num_ends += 1
        if num_ends == num_quotes:
            return
        parts.append(quote * num_ends)


def _escaped(reader: Reader, is_raw: bool) -> Reading[str]:
    """Return the text of an escape; its backslash was read."""
    letter = yield from reader.peek()
    if not is_raw and _OCTAL.fullmatch(letter):
        return chr(int((yield from _code(reader, _OCTAL, 3, is_exact=False)), 8))
    yield from reader.literal(letter)
    if is_raw:
        return f"\\{letter}"
    if letter in _CODES:
        point = int((yield from _code(reader, _HEX, _CODES[letter], is_exact=True)), 16)
        if point > 0x10FFFF:
            raise Malformed
        return chr(point)
    if letter == "N":
        yield from reader.literal("{")
        name = yield from reader.run(_CHARACTER_NAME, MAX_NAME_CHARACTERS)
        yield from reader.literal("}")
        try:
            return unicodedata.lookup(name)
        except KeyError:
            raise Malformed from None
    return _ESCAPES.get(letter, "\\" + letter)


def _code(reader: Reader, digit: re.Pattern[str], num_digits: int, is_exact: bool) -> Reading[str]:
    digits = ""
    while len(digits) < num_digits:
        character = yield from reader.peek()
        if not digit.fullmatch(character):
            if is_exact:
                raise Malformed
            break
        yield from reader.literal(character)
        digits += character
    return digits


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
