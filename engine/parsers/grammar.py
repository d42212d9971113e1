"""Building blocks for grammars of calls, in llguidance's dialect of Lark. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.errors import RequestError
from engine.grammars.schema import prepared, rule_of

ANY_TEXT = r"/(?s:.*)/"
MarkerIds = Callable[[str], "int | None"]
"""The token id of a marker, if the vocabulary has one."""


def literal(text: str) -> str:
    return json.dumps(text)


def marker(text: str, id_of: MarkerIds) -> str:
    """Return a marker as its token, or as text if it has none."""
    token_id = id_of(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def nested(lark: str) -> str:
    """Return a whole grammar as part of a rule."""
    return f"%lark {{\n{lark}\n}}"


def json_rule(schema: Mapping[str, Any], is_strict: bool) -> str:
    """Return the grammar of a value of `schema`, with the spaces that templates write in JSON. Parts of the schema that
    llguidance does not support are an error only if the schema is strict."""
    carried = _carried(schema) if is_strict else None
    if carried is not None:
        return carried
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not is_strict}
    try:
        return rule_of(prepared(schema, is_strict), options, literal)
    except ValueError as error:
        raise RequestError(f"tools: unsupported function parameters: {error}", code="invalid_value", param="tools") from None


def _carried(schema: Mapping[str, Any]) -> str | None:
    """Return the grammar of a text, or of a JSON object with one such text; None: the schema is something else."""
    from engine.parsers.text_grammar import carried_text, escaped  # needed only for forced calls

    text = carried_text(schema)
    if text is not None:
        return f"{literal(chr(34))} {nested(escaped(text))} {literal(chr(34))}"
    for key, own in properties_of(schema).items():
        value = _carried(own) if carried_text(own) is not None and len(properties_of(schema)) == 1 else None
        if value is not None:
            return f"{literal(f'{{{json.dumps(key)}: ')} {value} {literal('}')}"
    return None


def object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's parameters, made an object."""
    return schema if "type" in schema or "$ref" in schema or "anyOf" in schema else {**schema, "type": "object"}


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(parameters: Mapping[str, Any]) -> list[Any]:
    required = parameters.get("required")
    return required if isinstance(required, list) else []


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a single parameter, with the definitions it refers to."""
    own = schema if isinstance(schema, dict) else {}
    return {**own, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


class Lark:
    """A grammar under construction: rules by name."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        self._rules[name] = f"{name}{options}: {body.strip()}"
        return name

    def one_of(self, name: str, bodies: Iterable[str]) -> str:
        return self.add(name, "\n | ".join(bodies))

    def with_start(self, body: str) -> str:
        """Return the whole grammar with `body` as its start rule."""
        return "\n".join([f"start: {body}", *self._rules.values()]) + "\n"


def in_order(lark: Lark, name: str, items: list[tuple[str, bool]], separator: str = "") -> str:
    """Add a rule for items in order, each with whether it is optional, and a separator between two. Return the rule's name."""

    def add(index: int, is_first: bool) -> str:
        rule = f"{name}_{index}_{'first' if is_first else 'next'}"
        if index == len(items):
            return lark.add(rule, '""')
        item, may_be_missing = items[index]
        between = "" if is_first or not separator else literal(separator) + " "
        bodies = [f"{between}{item} {name}_{index + 1}_next"]
        return lark.one_of(rule, bodies + [f"{name}_{index + 1}_{'first' if is_first else 'next'}"] * may_be_missing)

    for index in range(len(items), -1, -1):
        add(index, is_first=False)
        add(index, is_first=True)
    return f"{name}_0_first"
