"""JSON values of parameters that a model wrote as plain text, by the schema of their function. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engine.parsers.family import decoded
from engine.parsers.python_literals import python_value
from engine.parsers.reader import Malformed

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_TYPES_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def string_of(text: str) -> str:
    """Return a text as a JSON string."""
    return orjson.dumps(text).decode()


def any_json(text: str) -> str | None:
    """Return a text that is JSON, without the space around it; None: it is not."""
    try:
        decoded(text, Any)
    except Malformed:
        return None
    return text.strip()


def typed(text: str, parameters: dict[str, Any], key: str) -> str:
    """Return the value of the parameter `key` as JSON text, with the type in the schema of `parameters`; a string if that names
    or allows no other type."""
    properties = parameters.get("properties")
    types = types_of(properties.get(key) if isinstance(properties, dict) else None, parameters)
    if types - {"string"}:
        bare = _PYTHON_WORDS.get(text.strip(), text)
        try:
            found = _TYPES_OF[type(decoded(bare, Any))]
        except Malformed:
            found = "string"
        if found != "string" and (found in types or (found == "integer" and "number" in types)):
            return bare.strip()
    return string_of(text)


def typed_python(text: str, parameters: dict[str, Any], key: str) -> str:
    """Return a value like `typed`, for models that write lists and dictionaries as Python prints them."""
    value = typed(text, parameters, key)
    if not value.startswith('"') or not text.strip().startswith(("[", "{", "(")):
        return value
    properties = parameters.get("properties")
    types = types_of(properties.get(key) if isinstance(properties, dict) else None, parameters)
    found = python_value(text) if types & {"array", "object"} else None
    return value if found is None else found


_TYPE_BY_KEYWORD = {  # for schemas without a type
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "minimum": "number",
    "maximum": "number",
    "multipleOf": "number",
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
}
_MAX_PARTS = 200  # parts of a schema that are checked


def types_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> set[str]:
    """Return the JSON types that a schema allows, as far as directly visible. `seen`: ids of visited parts; each is visited
    once, however many refer to it."""
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) >= _MAX_PARTS:
        return set()
    seen.add(id(schema))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return types_of(target, root, seen)
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = {name for name in names if isinstance(name, str)}
    for other in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(other)
        for branch in branches if isinstance(branches, list) else ():
            types |= types_of(branch, root, seen)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = {_TYPES_OF.get(type(value), "string") for value in values} if isinstance(values, list) else set()
    if not types:
        types = {type_ for keyword, type_ in _TYPE_BY_KEYWORD.items() if keyword in schema}
    return types | {"null"} if types and schema.get("nullable") is True else types
