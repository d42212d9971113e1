"""The grammar of a text in a call: the author's Lark, or Lark of the same text inside JSON.

Used by `grammar.py` for parameters with `x-lark` in their schema (custom tools of the Responses API). Inside JSON, quotes,
backslashes and control characters are escaped, so each terminal is rewritten to match the escaped text. Pure.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from typing import Any

from engine.errors import RequestError

Ranges = list[tuple[int, int]]  # of code points, [first, last], ascending and separate

KEY = "x-lark"
_MOST = 0x10FFFF
_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?) | (?P<comment>//[^\n]*) | (?P<regex>/(?![*+?/])(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<open>"(?:\\.|[^"\\\n])*|/(?![*+?/])(?:\\.|[^/\\\n])+)
    | (?P<import>%import\s+common\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?) | (?P<other>%(?!ignore\b)\w+|@\w+|<[^<>\n]{0,200}>)
    | (?P<ignore>%ignore[^\n]*) | (?P<range>\.\.) | (?P<terminal>(?<![A-Za-z0-9_])_?[A-Z][A-Z0-9_]*(?![A-Za-z0-9_]))""",
    re.VERBOSE,
)
_COMMON = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
_CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": [(48, 57)],
    "CATEGORY_SPACE": [(9, 13), (32, 32)],
    "CATEGORY_WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
}


def carried_text(schema: Any) -> str | None:
    """Return the grammar of a parameter that is a text; None: it is something else."""
    lark = schema.get(KEY) if isinstance(schema, dict) else None
    return lark if isinstance(lark, str) else None


def escaped(lark: str) -> str:
    """Return the grammar of the JSON string (without its quotes) of what `lark` matches. Raises RequestError if that is not
    possible.

    llguidance ends a terminal when no more of it can follow. Since anything may follow a backslash, nothing with escapes may be
    part of a longer terminal: terminals become rules of runs of plain characters and escapes.
    """
    kept = {match["name"] for match in _TOKEN.finditer(lark) if match["name"] and match["name"] not in _COMMON}
    return _TOKEN.sub(lambda match: _rewritten(match, kept), lark)


def _rewritten(match: re.Match[str], kept: set[str]) -> str:
    """Return a token of the grammar, rewritten. `kept`: terminals of the library that need no escapes."""
    text = match[0]
    if match["string"]:
        return _escaped_string(text)
    if match["regex"]:
        body, _, flags = text[1:].rpartition("/")
        return _escaped_regex(text, body.replace("\\/", "/"), flags)
    if match["open"]:  # as a whole, so that the rest is not scanned repeatedly
        raise _refused(f"{text[:40]} is not closed on its line")
    if match["terminal"]:
        return text if text in kept else _rule_of(text)
    if match["name"] and match["name"] in _COMMON:
        regex = _COMMON[match["name"]]
        return f"{_rule_of(match['alias'] or match['name'])}: {_escaped_regex('', regex, '')}"
    if match["other"] or match["range"] or match["ignore"] or match["alias"]:
        raise _refused(f"{text[:40]!r} is not supported in the grammar of a tool's input")
    return text


def _refused(why: str) -> RequestError:
    return RequestError(f"tools: {why}", code="invalid_value", param="tools")


def _rule_of(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _escaped_string(text: str) -> str:
    try:
        plain = json.loads(text.removesuffix("i"))
    except ValueError as error:
        raise _refused(f"{text[:40]} is not a valid string: {error}") from None
    inner = json.dumps(plain, ensure_ascii=False)[1:-1]
    if inner == plain:
        return text
    if text.endswith("i"):
        raise _refused(f"{text[:40]} ignores case and has a character that JSON escapes, which is not supported")
    return json.dumps(inner, ensure_ascii=False)


def _escaped_regex(text: str, body: str, flags: str) -> str:
    if set(flags) - {"s"}:
        raise _refused(f"the flags {flags!r} of /{body[:40]}/ are not supported; only s is")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(body, re.DOTALL if flags else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise _refused(f"/{body[:40]}/: {error}") from None
    return f"({_sequence(list(parsed), bool(parsed.state.flags & re.DOTALL), is_last=True)})"


def _sequence(nodes: list[Any], is_dot_all: bool, is_last: bool) -> str:
    last = len(nodes) - 1
    parts = (_node(op, value, is_dot_all, is_last and index == last) for index, (op, value) in enumerate(nodes))
    return " ".join(parts) or '""'


def _node(op: Any, value: Any, is_dot_all: bool, is_last: bool) -> str:
    """Return a part of a regex, as a node of `re`'s tree, as a rule's body. `is_last`: nothing of the regex follows."""
    characters = _characters(op, value, is_dot_all)
    if characters is not None:
        return _set(characters)
    name = str(op)
    if name == "BRANCH":
        return f"({' | '.join(_sequence(list(branch), is_dot_all, is_last) for branch in value[1])})"
    if name == "SUBPATTERN" and not value[1] and not value[2]:
        return f"({_sequence(list(value[3]), is_dot_all, is_last)})"
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, nodes = value
        is_endless = str(most) == "MAXREPEAT"
        repeated = _characters(nodes[0][0], nodes[0][1], is_dot_all) if len(nodes) == 1 else None
        if repeated is not None and is_last and is_endless and least <= 1:
            return f"({_set(repeated, '+')}){'+' if least else '*'}"
        body = _sequence(list(nodes), is_dot_all, is_last=False)
        return f"({body}){{{least},{'' if is_endless else most}}}"
    raise _refused(f"{name.lower()} in a regex is not supported in the grammar of a tool's input")


def _characters(op: Any, value: Any, is_dot_all: bool) -> Ranges | None:
    """Return the characters that a one-character node accepts."""
    name = str(op)
    if name == "LITERAL":
        return [(value, value)]
    if name == "NOT_LITERAL":
        return _complement([(value, value)])
    if name == "ANY":
        return [(0, _MOST)] if is_dot_all else _complement([(10, 10)])
    return _ranges(value) if name == "IN" else None


def _ranges(items: Iterable[Any]) -> Ranges:
    found: Ranges = []
    is_negated = False
    for op, value in items:
        name = str(op)
        if name == "NEGATE":
            is_negated = True
        elif name == "LITERAL":
            found.append((value, value))
        elif name == "RANGE":
            found.append(value)
        else:
            category = str(value)
            base = _CATEGORIES.get(category.replace("_NOT_", "_"))
            if base is None:
                raise _refused(f"{category.lower()} in a regex is not supported in the grammar of a tool's input")
            found += _complement(base) if "_NOT_" in category else base
    return _complement(found) if is_negated else found


def _complement(ranges: Ranges) -> Ranges:
    found: Ranges = []
    start = 0
    for first, last in sorted(ranges):
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return [*found, (start, _MOST)] if start <= _MOST else found


def _set(ranges: Ranges, repeat: str = "") -> str:
    """Return one of these characters as in JSON; with `repeat`, a run of those that need no escape."""
    special = [*range(0x20), 0x22, 0x5C]
    excluded = [(point, point) for point in special] + [(0xD800, 0xDFFF)]
    plain = _complement(_complement(ranges) + excluded)
    choices = [f"/[{''.join(f'{_point(first)}-{_point(last)}' for first, last in plain)}]{repeat}/"] if plain else []
    forms = [json.dumps(chr(point))[1:-1] for point in special if any(first <= point <= last for first, last in ranges)]
    if forms:
        choices.append(f"/{'|'.join(map(re.escape, forms))}/")
    if not choices:
        raise _refused("a regex matches no character")
    return f"({' | '.join(choices)})" if len(choices) > 1 else choices[0]


def _point(code: int) -> str:
    return f"\\x{{{code:x}}}"


_parser: Any = re._parser if hasattr(re, "_parser") else __import__("sre_parse")
