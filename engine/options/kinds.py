"""Kinds of option values: how a text is parsed, and the error if it is wrong. Used only by `engine/options/table.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.cluster.membership import DNS, parse_address

MAX_WHOLE = 1 << 53  # numbers up to here are exact in JSON too
_BYTE_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"(?P<number>[+-]?\d{1,20}|\d{1,20}\.\d{1,20})(?P<unit>[kKmMgG]?)")
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # bytes of an argument that are not UTF-8
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
MAX_PRIORITY = (1 << 31) - 1  # of a request, and of a key


class Kind(msgspec.Struct, frozen=True):
    """`parse` turns a text into the value, or raises ValueError that names what was expected."""

    metavar: str
    parse: Callable[[str], Any]
    is_list: bool = False
    is_flag: bool = False
    show: Callable[[Any], str] = str


def whole(least: int, most: int = MAX_WHOLE) -> Kind:
    """An integer in [least, most]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
        return _bounded(value, least, most)

    return Kind("N", parse)


def count(least: int, most: int = MAX_WHOLE) -> Kind:
    """An integer in [least, most], optionally in vLLM's notation: 32k is 32,000, 32K is 32,768."""

    def parse(text: str) -> int:
        match = _COUNT.fullmatch(text.strip())
        if match is None:
            raise ValueError("expected an integer, such as 4096, 32k (32,000) or 32K (32,768)")
        factor = _COUNT_UNITS[match["unit"]]
        value = float(match["number"]) * factor
        if value != int(value):
            raise ValueError("expected an integer")
        return _bounded(int(value) if "." in match["number"] else int(match["number"]) * factor, least, most)

    return Kind("N", parse)


def count_or_auto(least: int, most: int = MAX_WHOLE) -> Kind:
    """The same, or `auto` (or -1): 0."""
    number = count(least, most)
    return Kind("N", lambda text: 0 if text.strip() in ("auto", "-1") else number.parse(text))


def whole_numbers(least: int, most: int) -> Kind:
    """Several integers: the option repeated, or one text with commas."""
    single = whole(least, most)

    def parse(text: str) -> list[int]:
        return [single.parse(part.strip()) for part in text.split(",")]

    return Kind("N,...", parse, is_list=True, show=lambda values: ",".join(map(str, values)))


def seconds(least: float, most: float = 1e7) -> Kind:
    """Seconds in [least, most], whole or not."""
    return _time("seconds", least, most)


def milliseconds(least: float, most: float = 1e9) -> Kind:
    """Milliseconds in [least, most], whole or not."""
    return _time("milliseconds", least, most)


def _time(unit: str, least: float, most: float) -> Kind:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number of {unit}") from None
        if math.isnan(value):
            raise ValueError(f"expected a number of {unit}")
        return _bounded(value, least, most)

    return Kind(unit.upper(), parse, show=lambda value: f"{value:g}")


def address() -> Kind:
    """A host and a port, such as 10.0.0.1:9100; empty: none."""

    def parse(text: str) -> str:
        return str(parse_address(text)) if text else ""

    return Kind("HOST:PORT", parse)


def engines() -> Kind:
    """A file with addresses, made absolute, or `dns:` with a name and a port."""
    plain = path("FILE")

    def parse(text: str) -> str:
        return f"{DNS}{parse_address(text.removeprefix(DNS))}" if text.startswith(DNS) else str(plain.parse(text))

    return Kind("FILE", parse)


def gibibytes(least: float, most: float) -> Kind:
    """GiB in [least, most], whole or not."""

    def parse(text: str) -> float:
        try:
            return _bounded(float(text), least, most)
        except ValueError:
            raise ValueError(f"expected a number of GiB from {least:g} to {most:g}") from None

    return Kind("GB", parse, show=lambda value: f"{value:g}")


def share(least: float) -> Kind:
    """A fraction in [least, 1]."""

    def parse(text: str) -> float:
        try:
            return _bounded(float(text), least, 1.0)
        except ValueError:
            raise ValueError(f"expected a number from {least:g} to 1") from None

    return Kind("SHARE", parse, show=lambda value: f"{value:g}")


def identifier() -> Kind:
    """Return the kind of a prefix of names: letters, digits and underscores, no digit first."""

    def parse(text: str) -> str:
        if not _IDENTIFIER.fullmatch(text):
            raise ValueError("expected up to 64 letters, digits and underscores, such as vllm")
        return text

    return Kind("NAME", parse)


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
        return int(_bounded(float(match[1]) * (1 << _BYTE_UNITS[match[2].lower()]), least, MAX_WHOLE))

    return Kind("SIZE", parse, show=lambda size: f"{size >> 20}MiB")


def choice(*values: str) -> Kind:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return text

    return Kind("{" + ",".join(values) + "}", parse)


def choice_or_plugin(*values: str) -> Kind:
    """One of the values, or a name that only a plugin can know; the start checks it."""
    return Kind("{" + ",".join(values) + "}", text("NAME").parse)


def text(metavar: str) -> Kind:
    """Any text without line breaks or control characters, not empty."""

    def parse(value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise ValueError("expected printable text that is not empty")
        return value

    return Kind(metavar, parse)


def path(metavar: str) -> Kind:
    """A path that need not exist, made absolute."""
    plain = text(metavar)

    def parse(value: str) -> str:
        try:
            return str(Path(plain.parse(value)).expanduser().absolute())
        except RuntimeError:
            raise ValueError("expected a path; its user does not exist on this machine") from None

    return Kind(metavar, parse)


def path_or_auto(metavar: str) -> Kind:
    """The same, or `auto`, which stays."""
    plain = path(metavar)
    return Kind(metavar, lambda value: value if value == "auto" else plain.parse(value))


def host(metavar: str) -> Kind:
    """An address or a host name, whether or not it can be resolved."""
    plain = text(metavar)

    def parse(value: str) -> str:
        try:
            plain.parse(value).encode("idna")
        except UnicodeError:
            raise ValueError("expected an address or a host name with labels of 1 to 63 characters") from None
        return value

    return Kind(metavar, parse)


def template(metavar: str) -> Kind:
    """Any text, line breaks included."""

    def parse(value: str) -> str:
        if not value.strip() or _SURROGATE.search(value):
            raise ValueError("expected a template or the path of a template file")
        return value

    return Kind(metavar, parse)


def texts(metavar: str) -> Kind:
    """Several texts: the option repeated, or one text with commas."""
    single = text(metavar)

    def parse(value: str) -> list[str]:
        parts = value.split(",")
        if value.startswith("["):  # vLLM's notation
            try:
                parts = msgspec.json.decode(value, type=list[str])
            except msgspec.MsgspecError:
                raise ValueError("expected a JSON list of texts, or texts separated by commas") from None
        return [single.parse(part.strip()) for part in parts]

    return Kind(metavar, parse, is_list=True)


def networks() -> Kind:
    """Several networks of addresses: the option repeated, or one text with commas."""

    def parse(value: str) -> list[str]:
        try:
            return [str(ip_network(part.strip())) for part in value.split(",")]
        except ValueError as error:
            raise ValueError(f"expected a network such as 10.0.0.0/8 or fd00::/8: {error}") from None

    return Kind("NETWORK", parse, is_list=True)


def key_priorities() -> Kind:
    """Several KEY=PRIORITY: the option repeated, or one text with commas. The last `=` separates, since keys may contain
    some."""
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


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _bounded(value: _Number, least: float, most: float) -> _Number:
    if not least <= value <= most:
        is_known = most < MAX_WHOLE or value > most
        raise ValueError(f"expected {_shown(least)} to {_shown(most)}" if is_known else f"expected at least {_shown(least)}")
    return value
