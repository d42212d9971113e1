"""Kinds of option values: how the text of one is read and what is said when it is wrong. Used by `engine/options/table.py`
alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_BYTE_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
MAX_PRIORITY = (1 << 31) - 1  # of a request, and of a key


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` turns a text into the value or raises ValueError with what would have been right."""

    metavar: str
    parse: Callable[[str], Any]
    is_list: bool = False
    is_flag: bool = False
    show: Callable[[Any], str] = str


def whole(least: int, most: int = 1 << 53) -> Kind:
    """An integer in [least, most]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
        return _bounded(value, least, most)

    return Kind("N", parse)


def seconds(least: float, most: float = 1e7) -> Kind:
    """Seconds in [least, most], whole or not."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number of seconds") from None
        if math.isnan(value):
            raise ValueError("expected a number of seconds")
        return _bounded(value, least, most)

    return Kind("SECONDS", parse, show=lambda value: f"{value:g}")


def power_of_two(least: int, most: int) -> Kind:
    def parse(text: str) -> int:
        value: int = whole(least, most).parse(text)
        if value & (value - 1):
            below = 1 << (value.bit_length() - 1)
            raise ValueError(f"expected a power of two, such as {below} or {min(2 * below, most)}")
        return value

    return Kind("N", parse)


def num_bytes(least: int) -> Kind:
    """A size such as 2GiB, 512M or 1000000; units are powers of 1024."""

    def parse(text: str) -> int:
        match = _BYTES.fullmatch(text.strip())
        if match is None:
            raise ValueError("expected a size such as 2GiB, 512MiB or a number of bytes")
        value = int(float(match[1]) * (1 << _BYTE_UNITS[match[2].lower()]))
        if value < least:
            raise ValueError(f"expected at least {least} bytes")
        return value

    return Kind("SIZE", parse, show=lambda size: f"{size >> 20}MiB")


def choice(*values: str) -> Kind:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return text

    return Kind("{" + ",".join(values) + "}", parse)


def text(metavar: str) -> Kind:
    """Any text without line breaks or control characters, not empty."""

    def parse(value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise ValueError("expected a text")
        return value

    return Kind(metavar, parse)


def template(metavar: str) -> Kind:
    """Any text, line breaks included."""

    def parse(value: str) -> str:
        if not value.strip():
            raise ValueError("expected a template or the path of one")
        return value

    return Kind(metavar, parse)


def texts(metavar: str) -> Kind:
    """Several texts: the option repeated, or one text with commas."""
    single = text(metavar)

    def parse(value: str) -> list[str]:
        return [single.parse(part.strip()) for part in value.split(",")]

    return Kind(metavar, parse, is_list=True)


def key_priorities() -> Kind:
    """Several KEY=PRIORITY: the option repeated, or one text with commas. The last `=` counts: keys may have some."""
    priority = whole(-MAX_PRIORITY, MAX_PRIORITY)

    def parse(value: str) -> list[tuple[str, int]]:
        pairs = [part.strip().rpartition("=") for part in value.split(",")]
        if not all(key for key, _, _ in pairs):
            raise ValueError("expected KEY=PRIORITY, such as secret=10")
        return [(key, priority.parse(number)) for key, _, number in pairs]

    return Kind("KEY=PRIORITY", parse, is_list=True)


def flag() -> Kind:
    """True or false; on the command line --NAME and --no-NAME."""

    def parse(value: str) -> bool:
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise ValueError("expected true or false")

    return Kind("", parse, is_flag=True)


_Number = TypeVar("_Number", int, float)


def _bounded(value: _Number, least: float, most: float) -> _Number:
    if not least <= value <= most:
        raise ValueError(f"expected {least:g} to {most:g}" if most < 1e15 else f"expected at least {least:g}")
    return value
