"""JSON Schemas from clients: keywords that llguidance lacks, integers beyond 2^53, unique keys."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.grammars.formats import HEAD, lark_of
from engine.grammars.matching import Matching
from engine.grammars.tokens import GrammarTokens
from engine.grammars.unique_keys import KeyState
from engine.messages import AnswerFormat

LONG = [
    b'"a"',
    b'"a":',
    b'","a":',
    b'b"',
    b', "b": 1',
    b'":',
    b'"}',
    b"}}",
    b"{{",
    b'{"',
    b'\\u0061"',
    b"aa",
    b'a":1,"a',
    b"12",
]
END = 256 + len(LONG)
TOKENS = GrammarTokens.of([*(bytes([byte]) for byte in range(256)), *LONG, b"<end>"], [END], [], [END], END + 1)
LARGE = 9007199254740993


@pytest.fixture(scope="module")
def matching() -> Matching:
    return Matching(TOKENS)


def lark(schema: Any, is_strict: bool = False) -> str:
    return HEAD + lark_of(AnswerFormat("json", json.dumps(schema), "x", is_strict=is_strict), {})


def takes(matching: Matching, schema: Any, text: str, is_strict: bool = False) -> bool:
    grammar = lark(schema, is_strict)
    assert matching.error_of(grammar) == ""
    matcher = matching.matcher(grammar)
    token_ids = list(text.encode())
    return matcher.num_valid(token_ids) == len(token_ids) and matcher.consume(*token_ids) and matcher.is_accepting()


FORMATS = ("path", "file-path", "binary", "base64url", "ipvanyaddress", "ipvanynetwork", "ipv4network", "ipv6interface")
FORMATS += ("password", "json-string", "uri-reference", "multi-host-uri", "regex", "color", "int32", "made-up")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("is_strict", [False, True])
def test_unknown_format_is_ignored(matching: Matching, format_: str, is_strict: bool) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": format_}}, "required": ["format"]}
    assert takes(matching, schema, '{"format": "any /text"}', is_strict)
    assert not takes(matching, schema, '{"format": 1}', is_strict)


def test_known_formats_are_enforced(matching: Matching) -> None:
    right, wrong = '"123e4567-e89b-12d3-a456-426614174000"', '"no id"'
    for name in ("uuid", "uuid1", "uuid4", "uuid7"):
        assert takes(matching, {"type": "string", "format": name}, right)
        assert not takes(matching, {"type": "string", "format": name}, wrong)
    assert not takes(matching, {"type": "string", "format": "date"}, '"tomorrow"')


def test_values_that_look_like_schemas_are_left_alone(matching: Matching) -> None:
    value = {"format": "path", "nullable": True, "uniqueItems": True, "properties": {"a": 1}}
    assert takes(matching, {"const": value}, json.dumps(value, separators=(",", ":")))
    assert takes(matching, {"enum": [value]}, json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,2]", '["a"]'),
        (
            {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
            '{"a":1}',
            '{"a":"b"}',
        ),
        ({"type": "string", "nullable": True}, "null", "1"),
        ({"type": "string", "nullable": False}, '"a"', "null"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer", "nullable": True}}},
            '{"a":null}',
            '{"a":"b"}',
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", '"a"'),
    ],
)
def test_unsupported_keywords_are_ignored(matching: Matching, schema: Any, right: str, wrong: str) -> None:
    assert takes(matching, schema, right)
    assert not takes(matching, schema, wrong)


def test_named_properties_are_all_there_are(matching: Matching) -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert takes(matching, closed, '{"a": 1}')
    assert not takes(matching, closed, '{"a": 1, "b": 2}')
    for more in ({"additionalProperties": True}, {"patternProperties": {"^b": {}}}):
        assert takes(matching, closed | more, '{"a": 1, "b": 2}')
    parts = {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]}
    assert takes(matching, parts, '{"a": 1, "b": 2}')


@pytest.mark.parametrize("value", [LARGE, -LARGE, 2**63 - 1, 2**80 + 1])
def test_large_bounds_are_exact(matching: Matching, value: int) -> None:
    one = {"type": "integer", "minimum": value, "exclusiveMaximum": value + 1}
    from_it: dict[str, Any] = {"type": "integer", "minimum": value, "title": "Id"}
    up_to_it: dict[str, Any] = {"type": ["integer", "null"], "maximum": value}
    for schema, right, wrong in [
        (one, [value], [value - 1, value + 1]),
        (from_it, [value, value + 1, 10 * abs(value)], [value - 1]),
        (up_to_it, [value, value - 1, 0 if value > 0 else 2 * value], [value + 1]),
    ]:
        object_ = {"type": "object", "properties": {"id": schema, "n": {"$ref": "#/$defs/n"}}, "$defs": {"n": schema}}
        for integer in right:
            assert takes(matching, schema, str(integer)), (schema, integer)
            assert takes(matching, object_, f'{{"id": {integer}, "n": {integer}}}'), (schema, integer)
        for integer in wrong:
            assert not takes(matching, schema, str(integer)), (schema, integer)
            assert not takes(matching, object_, f'{{"n": {integer}}}'), (schema, integer)
    assert takes(matching, up_to_it, "null")
    assert not takes(matching, one, "null")


def test_large_bounds_in_other_places_are_kept(matching: Matching) -> None:
    """Nothing beyond the bound is allowed where no exact rule can be written."""
    bounded = {"type": "integer", "minimum": 0, "maximum": LARGE}
    for schema in (
        {"type": "array", "items": bounded, "minItems": 1},
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "$defs": {"n": bounded}},
    ):
        assert takes(matching, schema, f"[{LARGE - 1}]")
        assert not takes(matching, schema, f"[{LARGE + 1}]")


@pytest.mark.timeout(30)
def test_schemas_with_large_bounds_stay_small(matching: Matching) -> None:
    """Optional properties, references to one definition and to itself make no endless rule."""
    bounded = {"type": "integer", "maximum": 2**63 - 1}
    wide = {"type": "object", "properties": {f"p{index}": bounded for index in range(40)}}
    tree: dict[str, Any] = {
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}, "n": bounded},
    }
    chain: dict[str, Any] = {"d30": bounded}
    for level in range(30):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        chain[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}}
    for schema, right in [
        (wide, '{"p0": 1, "p39": 2}'),
        ({"$ref": "#/$defs/t", "$defs": {"t": tree}}, '{"l": {"n": 1}, "n": 2}'),
        ({"$ref": "#/$defs/d0", "$defs": chain}, '{"b": {}}'),
    ]:
        assert takes(matching, schema, right)
        assert len(lark(schema)) < 1 << 19
    with pytest.raises(ValueError, match="recursive schema"):
        lark({"$ref": "#/$defs/t", "$defs": {"t": tree | {"properties": tree["properties"] | {"n": {"const": LARGE}}}}})


def test_optional_properties_beside_large_integers(matching: Matching) -> None:
    large = {"const": LARGE}
    schema = {"type": "object", "properties": {"a": large, "b": large, "c": large, "d": large}, "required": ["c"]}
    for names in ("c", "ac", "bc", "abc", "cd", "abcd"):
        assert takes(matching, schema, json.dumps(dict.fromkeys(names, LARGE))), names
    for names in ("", "a", "ab", "ad", "ca", "bac"):
        assert not takes(matching, schema, json.dumps(dict.fromkeys(names, LARGE))), names
    free = {key: value for key, value in schema.items() if key != "required"}
    for names in ("", "a", "d", "bd", "abcd"):
        assert takes(matching, free, json.dumps(dict.fromkeys(names, LARGE))), names
    assert not takes(matching, free, json.dumps(dict.fromkeys("db", LARGE)))


@pytest.mark.parametrize("value", [LARGE, -LARGE, 12345678901234567890, 2**80 + 1])
def test_large_integers_are_exact(matching: Matching, value: int) -> None:
    constant = {"const": value}
    object_ = {"type": "object", "properties": {"x": {"type": "string"}, "id": constant}, "required": ["id"]}
    optional = {"type": "object", "properties": {"id": {"enum": [value]}, "x": {"type": "integer"}}}
    referring = {"type": "object", "properties": {"id": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": constant}}
    cases: list[tuple[Any, str]] = [
        (constant, "%d"),
        ({"enum": ["a", value, None]}, "%d"),
        (object_, '{"id": %d}'),
        (object_, '{"x": "y", "id":%d}'),
        (optional, '{"id": %d, "x": 1}'),
        ({"type": "array", "items": {"anyOf": [constant, {"type": "string"}]}}, '["a", %d]'),
        (referring, '{"id": %d}'),
    ]
    for schema, text in cases:
        assert takes(matching, schema, text % value), schema
        assert not takes(matching, schema, text % (value + 1)), schema
        assert not takes(matching, schema, text % (value - 1)), schema
    assert takes(matching, optional, '{"x": 1}')
    assert takes(matching, {"type": "array", "items": constant}, "[]")


OPEN: tuple[Any, ...] = (
    {"type": "object"},
    True,
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^[ab]": {"type": "object"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "object"}, "b": True}, "additionalProperties": True},
    {"type": "array", "items": {"type": "object", "additionalProperties": {"enum": [1, {}]}}},
)


@pytest.mark.parametrize("schema", OPEN)
def test_keys_are_unique(matching: Matching, schema: Any) -> None:
    """Whichever allowed tokens are sampled, some of several characters."""
    num_keys = 0
    for seed in range(30):
        draw, matcher = random.Random(seed), matching.matcher(lark(schema))
        token_ids: list[int] = []
        for _ in range(150):
            mask = matcher.mask()
            allowed = [index for index in range(TOKENS.num_tokens) if mask[index // 8] >> index % 8 & 1]
            wanted = [index for index in allowed if index >= 256 or chr(index) in '{}[]",:ab1 ']
            token_id = draw.choice(wanted or allowed)
            if token_id == END:
                break
            assert matcher.num_valid([token_id]) == 1
            if len(token_ids) % 7 == 3:  # as drafts are taken back
                assert matcher.consume(token_id)
                assert matcher.rollback(1)
                matcher = matcher.copy()
            assert matcher.consume(token_id)
            token_ids.append(token_id)
        state = KeyState()
        for token_id in token_ids:
            data = LONG[token_id - 256] if token_id >= 256 else bytes([token_id])
            following = state.after(data)
            assert following is not None, (seed, token_ids)
            state = following
            num_keys += len(state.objects[-1] or ()) if state.objects else 0
    assert num_keys


def test_a_key_written_with_escapes_is_the_same(matching: Matching) -> None:
    assert takes(matching, {"type": "object"}, '{"a":1,"b":{"a":1}}')
    assert not takes(matching, {"type": "object"}, '{"a":1,"a":2}')
    state = KeyState().after(b'{"a":1,"b":{"a":1},"')
    assert state is not None
    assert state.after(b'c":2') is not None
    for again in (b'a"', b'\\u0061"', b'c":2,"b"'):
        assert state.after(again) is None
