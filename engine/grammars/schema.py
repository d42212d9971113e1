"""Converts JSON Schemas for llguidance. Pure.

Used by `formats.py` and by the families of tool calls. The library rejects or rounds some keywords of the standard. Here they
are replaced, or left out if the standard (or a request that is not strict) allows it:

- an unknown `format` is ignored, pydantic's own formats (`path`, `ipvanyaddress`, `binary`, ...) among them;
- `uniqueItems` and `propertyNames` are left out unless the schema is strict;
- `nullable` (OpenAPI) allows null;
- an object with `properties` that does not mention others has no others;
- `const`, `enum` and bounds with integers beyond 2^53, which the library rounds, get their own rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.grammars.integer_range import pattern_of

KNOWN_FORMATS = frozenset(  # formats for which llguidance has a regex
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}
MAX_EXACT = 2**53
_UNENFORCED = ("uniqueItems", "propertyNames")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "not", "contains", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_MAX_RULE_CHARACTERS = 1 << 18
_MAX_DEPTH = 400  # depth of nested schemas; Python's own limit is a thousand calls


def prepared(schema: Any, is_strict: bool) -> Any:
    """Return the schema in keywords that llguidance supports. Raises ValueError if it is nested too deeply."""
    closes = not any("allOf" in node for node in _nodes(schema))  # its parts would each reject the others' properties
    return _map(schema, lambda node: _prepared_node(node, is_strict, closes), _MAX_DEPTH)


def has_open_objects(schema: Any) -> bool:
    """Return whether objects may have properties that the (prepared) schema does not name."""
    return any(_is_open(node) for node in _nodes(schema)) or not isinstance(schema, dict)


def rule_of(schema: Any, options: Mapping[str, Any], literal: Callable[[str], str]) -> str:
    """Return the body of a Lark rule for the schema. `options`: of llguidance, for white space; `literal` quotes a text."""
    rule = _Rule(schema, options, literal)
    try:
        return rule.body(schema, _MAX_DEPTH)
    except ValueError:
        if rule.has_large_values:
            raise
        return rule.json(schema)  # only large bounds, in a schema for which no rule is possible: they are rounded


def _prepared_node(node: dict[str, Any], is_strict: bool, closes: bool) -> dict[str, Any]:
    made: dict[str, Any] = {key: value for key, value in node.items() if is_strict or key not in _UNENFORCED}
    format_ = made.get("format")
    if isinstance(format_, str):
        format_ = SAME_FORMATS.get(format_, format_)
        made["format"] = format_
        if format_ not in KNOWN_FORMATS:
            del made["format"]
    nullable = made.pop("nullable", None) if isinstance(made.get("nullable"), bool) else None
    if closes and isinstance(made.get("properties"), dict) and made["properties"] and _says_nothing_of_others(made):
        made["additionalProperties"] = False
    if nullable:
        kept: dict[str, Any] = {key: made.pop(key) for key in ("$defs", "definitions") if key in made}
        made = {"anyOf": [made, {"type": "null"}], **kept}
    return made


def _says_nothing_of_others(node: Mapping[str, Any]) -> bool:
    others = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref")
    required = node.get("required")
    names = required if isinstance(required, list) else []
    return not any(key in node for key in others) and all(name in node["properties"] for name in names if isinstance(name, str))


def _is_open(node: Mapping[str, Any]) -> bool:
    """Return whether objects are open: they are unless stated otherwise; a schema without a type may be an object."""
    if any(key in node for key in ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")) and "properties" not in node:
        return False
    types = node.get("type", "object")
    can_be_object = types == "object" or (isinstance(types, list) and "object" in types)
    return can_be_object and (node.get("additionalProperties") is not False or bool(node.get("patternProperties")))


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema inside a schema, itself first; not values that only look like one, such as a `const`."""
    rest = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            yield node
            rest.extend(child for _, child in _children(node))


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _OF_SCHEMAS:
        children = node.get(key)
        yield from ((key, child) for child in (children.values() if isinstance(children, dict) else ()))
    for key in (*_LISTS, "items"):
        children = node.get(key)
        yield from ((key, child) for child in (children if isinstance(children, list) else ()))
    for key in _SINGLE:
        if isinstance(node.get(key), dict):
            yield key, node[key]


def _map(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not depth:
        raise ValueError("it is nested too deeply")
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_SCHEMAS and isinstance(value, dict):
            made[key] = {name: _map(child, change, depth - 1) for name, child in value.items()}
        elif isinstance(value, list) and (key in _LISTS or key == "items"):
            made[key] = [_map(child, change, depth - 1) for child in value]
        else:
            made[key] = _map(value, change, depth - 1) if key in _SINGLE else value
    return change(made)


# ------------------------------------------------------------------------------------------------------ exact integers


def _has_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large, value.values()))
    if isinstance(value, list):
        return any(map(_has_large, value))
    return isinstance(value, int) and abs(value) > MAX_EXACT


def _values(node: Mapping[str, Any]) -> list[Any]:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else []


def _has_large_bound(node: Mapping[str, Any]) -> bool:
    return "integer" in _types(node) and any(type(node.get(key)) is int and abs(node[key]) > MAX_EXACT for key in _BOUNDS)


def _types(node: Mapping[str, Any]) -> list[Any]:
    types = node.get("type")
    return types if isinstance(types, list) else [types]


def _is_inexact(node: Mapping[str, Any]) -> bool:
    """Return whether the library would round a number in it."""
    return _has_large(_values(node)) or _has_large_bound(node)


def _integers(node: Mapping[str, Any]) -> str:
    """Return a regex of the integers within the bounds of a schema; "" if there are none."""
    lows = [math.ceil(node["minimum"])] if _is_number(node.get("minimum")) else []
    highs = [math.floor(node["maximum"])] if _is_number(node.get("maximum")) else []
    if _is_number(node.get("exclusiveMinimum")):
        lows.append(math.floor(node["exclusiveMinimum"]) + 1)
    if _is_number(node.get("exclusiveMaximum")):
        highs.append(math.ceil(node["exclusiveMaximum"]) - 1)
    return pattern_of(max(lows, default=None), min(highs, default=None))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_rounded_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with bounds beyond 2^53 rounded inwards to numbers of the library."""
    if not _has_large_bound(node):
        return node
    made = dict(node)
    for key, away in _BOUNDS.items():
        bound = made.get(key)
        if type(bound) is int and abs(bound) > MAX_EXACT:
            rounded = int(float(bound)) if abs(bound) < 2**1000 else bound
            if (rounded - bound) * away < 0:
                rounded = int(math.nextafter(float(bound), away * math.inf))
            made[key] = rounded
    return made


class _Rule:
    """Lark rules for a schema: `%json`, except on the way to integers that the library would round."""

    def __init__(self, root: Any, options: Mapping[str, Any], literal: Callable[[str], str]) -> None:
        self._root = root
        self._options = options
        self._literal = literal
        self._comma = literal(options.get("item_separator", ","))
        self._colon = literal(options.get("key_separator", ":"))
        self._has_large = any(_is_inexact(node) for node in _nodes(root))
        self._is_large: dict[int, bool] = {}  # by the schema's id: whether it contains an integer that would be rounded
        self._open: list[int] = []  # ids of the schemas around the current one
        self._num_left = _MAX_RULE_CHARACTERS

    @property
    def has_large_values(self) -> bool:
        """Whether a `const` or `enum` has an integer that the library would round."""
        return any(_has_large(_values(node)) for node in _nodes(self._root))

    def body(self, schema: Any, depth: int) -> str:
        """Return the body of a rule. Raises ValueError if the schema is too large, refers to itself, or has a large integer
        where no rule is possible."""
        text = self._body(schema, depth)
        self._num_left -= len(text) + 1
        if self._num_left < 0:
            raise ValueError(f"integers beyond 2^53 need a rule of more than {_MAX_RULE_CHARACTERS} characters, the limit")
        return text

    def _body(self, schema: Any, depth: int) -> str:
        target = self._resolved(schema, depth) if self._has_large and isinstance(schema, dict) else schema
        if not isinstance(target, dict) or not self._reaches_large(target):
            return self.json(schema)
        if _has_large(_values(target)):
            return f"({' | '.join(self._literal(json.dumps(value, ensure_ascii=False)) for value in _values(target))})"
        if _has_large_bound(target) and set(target) <= _OF_INTEGERS and set(_types(target)) <= {"integer", "null"}:
            pattern = _integers(target)
            if not pattern:
                raise ValueError(f"no integer is within the bounds of {_short(target)}")
            null = ' | "null"' if "null" in _types(target) else ""
            return f"(/{pattern}/{null})"
        alternatives = target.get("anyOf") or target.get("oneOf")
        if isinstance(alternatives, list) and set(target) <= {"anyOf", "oneOf", *_NOTES}:
            return f"({' | '.join(self.body(each, depth - 1) for each in alternatives)})"
        if target.get("additionalProperties") is False and set(target) <= _OF_OBJECTS and "properties" in target:
            if id(target) in self._open:
                raise ValueError(f"integers beyond 2^53 are not supported in a recursive schema: {_short(target)}")
            self._open.append(id(target))
            text = self._object(target, depth)
            self._open.pop()
            return text
        if isinstance(target.get("items"), dict) and set(target) <= {"items", *_NOTES}:
            item = self.body(target["items"], depth - 1)
            return f'"[" {self._space} ({item} ({self._space} {self._comma} {self._space} {item})* {self._space})? "]"'
        if not any(_has_large(_values(node)) for node in self._reached(target)):
            return self.json(schema)
        raise ValueError(
            f"integers beyond 2^53 are supported only in const and enum of properties, items and anyOf: {_short(target)}"
        )

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return a rule for properties in order, with optional ones."""
        names, required = [*schema["properties"]], schema.get("required", ())
        comma = f"{self._space} {self._comma} {self._space}"
        members = []
        for name, child in schema["properties"].items():
            key = self._literal(json.dumps(name, ensure_ascii=False))
            members.append(f"{key} {self._space} {self._colon} {self._space} {self.body(child, depth - 1)}")
        # always present: commas are placed around it
        firsts = [place for place, name in enumerate(names) if name in required][:1]
        if not firsts and len(members) * sum(map(len, members)) > self._num_left:
            raise ValueError(f"integers beyond 2^53 need a rule of more than {_MAX_RULE_CHARACTERS} characters, the limit")
        objects = []
        for first in firsts or range(len(members)):
            before = [f"({member} {comma})?" for member in members[:first]] if firsts else []
            behind = [
                f"{comma} {member}" if name in required else f"({comma} {member})?"
                for name, member in zip(names[first + 1 :], members[first + 1 :], strict=True)
            ]
            objects.append(" ".join([*before, members[first], *behind]))
        if not firsts:
            objects.append('""')
        return f'"{{" {self._space} ({" | ".join(objects)}) {self._space} "}}"'

    @property
    def _space(self) -> str:
        pattern = self._options.get("whitespace_pattern")
        return f"/({pattern.replace('/', chr(92) + '/')})?/" if pattern else '""'

    def json(self, schema: Any) -> str:
        own = schema if isinstance(schema, dict) else {"allOf": [schema]}
        own = _map(own, _with_rounded_bounds, _MAX_DEPTH)
        definitions = {
            key: _map({key: self._root[key]}, _with_rounded_bounds, _MAX_DEPTH)[key]
            for key in ("$defs", "definitions")
            if isinstance(self._root, dict) and key in self._root
        }
        return "%json " + json.dumps({**definitions, **own, "x-guidance": dict(self._options)}, ensure_ascii=False)

    def _resolved(self, schema: dict[str, Any], depth: int) -> Any:
        if depth <= 0:
            raise ValueError("it is nested too deeply")
        target: Any = schema
        for _ in range(_MAX_DEPTH):
            reference = target.get("$ref") if isinstance(target, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return target
            target = self._root
            for step in reference[2:].split("/"):
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return schema

    def _reaches_large(self, schema: dict[str, Any]) -> bool:
        key = id(schema)
        if key not in self._is_large:
            self._is_large[key] = any(_is_inexact(node) for node in self._reached(schema))
        return self._is_large[key]

    def _reached(self, schema: Any) -> Iterator[dict[str, Any]]:
        """Yield the schemas inside a schema, and those that they refer to."""
        seen: set[int] = set()
        rest = [schema]
        while rest:
            node = rest.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            rest.extend(child for key, child in _children(node) if key not in ("$defs", "definitions"))
            if isinstance(node.get("$ref"), str):
                rest.append(self._resolved(node, _MAX_DEPTH))


_NOTES = ("title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "type")
# with the side on which the integers are
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_OF_INTEGERS = {*_BOUNDS, "format", *_NOTES}
_OF_OBJECTS = {"properties", "required", "additionalProperties", *_NOTES}


def _short(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)[:200]
