"""Generated JSON schemas: every supported construction, nested at random; and a question that fits all of them."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "tags", "city", "price", "note", "kind", "größe", 'a"b', "x y")
_FORMATS = ("date", "time", "uuid", "ipv4", "email")
_PATTERNS = ("^[A-Z]{2,4}-[0-9]{1,3}$", "^(red|green)+$", "^a.c$")


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return an object or array schema that is small enough to be answered."""
    kinds = [_integer, _number, _string, _enum, _const, _flag]
    if depth:
        kinds = [_object] * 3 + [_array] * 2 + ([*kinds, _any_of, _reference, _prefixed] if depth < 3 else [])
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    schema: Schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    schema["required"] = names if rng.random() < 0.6 else rng.sample(names, rng.randrange(len(names) + 1))
    schema["additionalProperties"] = False if rng.random() < 0.8 else {"type": "integer"}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.randrange(1, 3)}


def _prefixed(rng: random.Random, depth: int) -> Schema:
    items = [random_schema(rng, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": least, rng.choice(["maximum", "exclusiveMaximum"]): least + rng.randrange(1, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"type": "number", "minimum": -1.5, "maximum": 20}, {"type": "number", "exclusiveMinimum": 0}])


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(4)
    plain = {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 12)}
    formatted = {"type": "string", "format": rng.choice(_FORMATS)}
    return rng.choice([plain, plain, formatted, {"type": "string", "pattern": rng.choice(_PATTERNS)}])


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "grün", 3, None, True, -1.5, [1, "a"], {"k": "v"}], rng.randrange(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["yes", 7, None, {"a": [1, 2]}])}


def _flag(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    """Return a reference. `$defs` are those of the outermost schema, where `with_definitions` puts them."""
    return {"$ref": f"#/$defs/{rng.choice(['point', 'tree'])}"}


def with_definitions(schema: Schema) -> Schema:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    branches = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    tree = {"type": "object", "properties": {"leaves": branches}, "additionalProperties": False}
    return {**schema, "$defs": {"point": point, "tree": tree}}


def schemas(count: int, seed: int) -> list[Schema]:
    rng = random.Random(seed)
    return [with_definitions(random_schema(rng)) for _ in range(count)]
