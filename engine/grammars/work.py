"""Counts the work of compiling a grammar's schemas. For schemas that take more than linear time the library has no limit of its
own, and a clock would differ between machines. Pure.

Used by the tokenizer's helpers. A unit is about a millisecond on a current core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MAX_WORK = 150
PATTERNS_PER_UNIT = 25  # `patternProperties` to the third power: each is compared with all others
MULTIPLE_PER_UNIT = 160  # an automaton counts up to it
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")  # of numbers: about a unit for each new one

_SCHEMA = re.compile(r"%json\s*(?=\{)")
_decoder = json.JSONDecoder()


def check_work(lark: str) -> None:
    """Raise ValueError that names the part of the schemas in `lark` that is too much work."""
    work: dict[str, float] = {}
    bounds: set[tuple[Any, ...]] = set()
    for schema in _schemas(lark):
        for node in _nodes(schema):
            patterns, multiple = node.get("patternProperties"), node.get("multipleOf")
            if isinstance(patterns, dict):
                _add(work, "patternProperties", (len(patterns) / PATTERNS_PER_UNIT) ** 3)
            if isinstance(multiple, int | float) and multiple:
                _add(work, "multipleOf", _coefficient(multiple) / MULTIPLE_PER_UNIT)
            bound = tuple(repr(node.get(name)) for name in BOUNDS if name in node)
            if bound and bound not in bounds:
                bounds.add(bound)
                _add(work, "minimum and maximum", 1)
    total = sum(work.values())
    if total > MAX_WORK:
        worst = max(work, key=lambda name: work[name])
        raise ValueError(
            f"it is too complex: {worst} alone needs {work[worst]:.0f} units of work, the limit in total is {MAX_WORK}; use "
            "less of it"
        )


def _add(work: dict[str, float], name: str, units: float) -> None:
    work[name] = work.get(name, 0) + units


def _coefficient(number: int | float) -> int:
    """Return the digits of a number, without trailing zeros."""
    return abs(int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits))))


def _schemas(lark: str) -> Iterator[Any]:
    place = 0
    while match := _SCHEMA.search(lark, place):
        place = match.end()
        try:
            schema, place = _decoder.raw_decode(lark, place)
        except (ValueError, RecursionError):  # the library reports what is wrong with it
            continue
        yield schema


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in it, at any depth."""
    rest = [schema]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            yield each
            rest.extend(each.values())
        elif isinstance(each, list):
            rest.extend(each)
