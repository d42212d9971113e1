"""Decodes a request body as a JSON object without blocking the event loop.

Called by `RequestContext` in the api process. A parser blocks the loop (and the interpreter) from the first byte to the last.
So the values of a body are counted before anything is built from it, and a large one is decoded in parts, with a turn of the
loop after each part and each counted slice:

    {"model": "m", "prompt": ["a", "b", "c"], "n": 2}
     ------------  ---------   -----  ---     ------     parts: members of the object, elements of an array in it

Only one body is decoded this way at a time; others wait, so that many block the loop no longer than one.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import orjson

from engine.errors import RequestError

_TOKEN = re.compile(rb'"[^"]*"?|[][{}:,]')
# name of a member, and whether its value is an array
_NAME = re.compile(rb'\s{0,64}"([A-Za-z0-9_]{1,64})"\s{0,64}:\s{0,64}(\[)?')

Text: TypeAlias = bytes | bytearray


class DecodingLimits(msgspec.Struct, frozen=True):
    """Sizes in bytes. A body within `whole_*` is decoded at once."""

    whole_bytes: int = 1 << 20
    whole_values: int = 1 << 16
    whole_containers: int = 1 << 14
    slice_bytes: int = 16 << 10  # counted in one turn of the loop
    part_bytes: int = 1 << 20  # decoded in one turn, except for a single longer element
    max_element_bytes: int = 8 << 20
    max_values: int = 1 << 19
    max_names: int = 1 << 16
    max_containers: int = 1 << 16


class BodyDecoder:
    """Decodes the bodies of one api process."""

    def __init__(self, limits: DecodingLimits) -> None:
        self._limits = limits
        self._line = asyncio.Lock()

    async def decode(self, body: Text) -> dict[str, Any]:
        """Return a body as a JSON object. Raises RequestError if it is none, or has more or longer values than any request
        needs. NaN, unpaired surrogates, invalid UTF-8 and deep nesting are rejected."""
        if self._is_light(body):
            fields = _loads(body)
            if not isinstance(fields, dict):
                raise _not_json("expected a JSON object")
            return fields
        async with self._line:
            outline = _Outline(self._limits)
            for start, end in _slices(body, self._limits.slice_bytes):
                outline.take(body[start:end], start)
                await asyncio.sleep(0)
            outline.check(body)
            fields = {}
            for _ in _decode_parts(body, outline, self._limits, fields):
                await asyncio.sleep(0)
            return fields

    def _is_light(self, body: Text) -> bool:
        """Return whether it is short and has few values, even if every comma and bracket in a text counted as JSON."""
        limits = self._limits
        return (
            len(body) <= limits.whole_bytes
            and body.count(b"[") + body.count(b"{") <= limits.whole_containers
            and body.count(b",") + body.count(b":") <= limits.whole_values
        )


class _Outline(msgspec.Struct):
    """Result of one pass over a body: its size, and where it can be split, at commas and closing brackets."""

    limits: DecodingLimits
    depth: int = 0
    num_commas: int = 0
    num_names: int = 0
    num_texts: int = 0
    num_containers: int = 0
    is_in_text: bool = False
    start: int = -1  # of the object
    end: int = -1  # of the object: its closing bracket
    member_ends: array[int] = msgspec.field(default_factory=lambda: array("q"))  # commas at depth 1
    element_ends: array[int] = msgspec.field(default_factory=lambda: array("q"))  # commas at depth 2
    # brackets from depth 2 to 1: ends of members' values
    closings: array[int] = msgspec.field(default_factory=lambda: array("q"))

    def take(self, raw: Text, offset: int) -> None:
        """Scan the next slice, which starts and ends outside of escape sequences."""
        text = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        begin = 0
        if self.is_in_text:
            begin = text.find(b'"') + 1
            self.is_in_text = not begin
        if not self.is_in_text:
            for match in _TOKEN.finditer(text, begin):
                self._take_token(match[0], offset + match.start())
        limits = self.limits
        if (
            self.num_commas > limits.max_values
            or self.num_texts > limits.max_values + limits.max_names
            or self.num_names > limits.max_names
            or self.num_containers > limits.max_containers
        ):
            most = f"{limits.max_values} values, {limits.max_names} names, {limits.max_containers} lists and objects"
            raise RequestError(f"the body exceeds the limits of {most}; send less", code="body_too_complex")

    def _take_token(self, token: bytes, position: int) -> None:
        if self.depth == 0 and (self.start >= 0 or token != b"{"):
            raise _not_json("expected one JSON object")
        if token == b",":
            self.num_commas += 1
            if self.depth == 1:
                self.member_ends.append(position)
            elif self.depth == 2:
                self.element_ends.append(position)
        elif token == b":":
            self.num_names += 1
        elif token in (b"[", b"{"):
            self.depth += 1
            self.num_containers += 1
            if self.depth == 1:
                self.start = position
        elif token in (b"]", b"}"):
            self.depth -= 1
            if self.depth == 1:
                self.closings.append(position)
            elif self.depth == 0:
                self.end = position
        else:
            self.num_texts += 1
            self.is_in_text = len(token) == 1 or not token.endswith(b'"')

    def check(self, body: Text) -> None:
        """Check that the body is one pair of brackets with nothing around it."""
        if self.end < 0:
            raise _not_json("unexpected end of input")
        if not (_is_blank(body, 0, self.start) and body[self.end] == ord("}") and _is_blank(body, self.end + 1, len(body))):
            raise _not_json("expected one JSON object")


def _decode_parts(body: Text, outline: _Outline, limits: DecodingLimits, fields: dict[str, Any]) -> Iterator[None]:
    """Fill `fields`; yield when the loop should have a turn."""
    for start, end, is_only in _spans(outline.member_ends, outline.start + 1, outline.end, limits.part_bytes):
        match = _NAME.match(body, start, end) if end - start > limits.part_bytes else None
        name = match[1].decode() if match else ""
        if match is None or not match[2]:
            _check_element(name, end - start, limits)
            fields.update(_filled(_loads(b"{" + body[start:end] + b"}"), is_only))
        else:
            first = match.end()
            closing = outline.closings[bisect_left(outline.closings, first)]
            if body[closing] != ord("]") or not _is_blank(body, closing + 1, end):
                raise _not_json("expected a comma or the end of a list")
            elements: list[Any] = []
            fields[name] = elements
            for start_of_some, end_of_some, are_all in _spans(outline.element_ends, first, closing, limits.part_bytes):
                _check_element(name, end_of_some - start_of_some, limits)
                elements += _filled(_loads(b"[" + body[start_of_some:end_of_some] + b"]"), are_all)
                yield
        yield


def _spans(cuts: array[int], start: int, end: int, most: int) -> Iterator[tuple[int, int, bool]]:
    """Yield bytes [start, end) without the commas at `cuts`, in spans of at most `most` bytes (unless a single item is longer),
    and whether it is one span."""
    low, high = bisect_left(cuts, start), bisect_left(cuts, end)
    is_only = low == high
    while low < high and end - start > most:
        reached = max(bisect_right(cuts, start + most, low, high) - 1, low)
        yield start, cuts[reached], is_only
        start, low = cuts[reached] + 1, reached + 1
    yield start, end, is_only


def _slices(body: Text, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield slices [start, end); none ends between a backslash and the character it escapes."""
    start = 0
    while start < len(body):
        end = min(start + num_bytes, len(body))
        text = body[start:end]
        end += (len(text) - len(text.rstrip(b"\\"))) & 1
        yield start, end
        start = end


def _loads(text: Text) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _not_json(error.msg) from None


def _filled(content: Any, may_be_empty: bool) -> Any:
    if not content and not may_be_empty:
        raise _not_json("missing value before or after a comma")
    return content


def _check_element(name: str, num_bytes: int, limits: DecodingLimits) -> None:
    if num_bytes > limits.max_element_bytes:
        raise RequestError(
            f"{name or 'the body'}: a value has {num_bytes} bytes, limit {limits.max_element_bytes}; send less",
            code="context_length_exceeded",
            param=name,
        )


def _is_blank(body: Text, start: int, end: int) -> bool:
    return not body[start:end].strip(b" \t\r\n")


def _not_json(why: str) -> RequestError:
    return RequestError(f"the body is not valid JSON: {why}", code="invalid_json")
