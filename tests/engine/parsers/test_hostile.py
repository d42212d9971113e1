"""Hostile answers and tools: no exception, no lost text, and work linear in the length."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import orjson
import pytest

from engine.errors import RequestError
from engine.messages import Parsing, Part
from engine.parsers.family import Tools
from engine.parsers.grammar import json_rule
from engine.parsers.registry import Parsers
from engine.parsers.typed_values import typed
from engine.tokenizer.part_stream import PartStream
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.parsers.answers import (
    CALL_FAMILIES,
    ONE_OF_EACH_CLASS,
    parse,
    pieces_of,
    stream_of,
    submit_of,
    tokens_of,
    vocabulary_of,
)

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PIECES = [
    *{marker for family in CALL_FAMILIES.values() for marker in (*family.triggers, *family.markers)},
    *(
        "<think>",
        "</think>",
        "<response>",
        "</response>",
        "<",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        "\n",
        ", ",
        ": ",
        "f",
    ),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {', "<function=f>", "<parameter=a>", "</parameter>", "f("),
    *("</function>", "a=", "1", "null", "```json", "\x00", "é", "😀", " ", "function"),
]


FRAMED = ("harmony", "functionary_v32")  # markers around each text, which are no part of it


def vocabularies(name: str) -> list[Vocabulary]:
    family = CALL_FAMILIES[name]
    return [vocabulary_of([]), vocabulary_of(["<think>", "</think>", *family.triggers, *family.markers])]


def opened(name: str, vocabulary: Vocabulary, prompt_end: str = "") -> PartStream:
    return stream_of(Parsers(name, "qwen3", vocabulary.pieces), vocabulary, submit_of(TOOLS), prompt_end)


@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_any_text_in_any_pieces_is_parsed(name: str) -> None:
    draw = random.Random(name)
    for number in range(16):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 25)))
        for vocabulary in vocabularies(name):
            token_ids = tokens_of(text, vocabulary)
            prompt_end = draw.choice(("", "<think>\n"))
            whole = parse(opened(name, vocabulary, prompt_end), [token_ids])
            assert parse(opened(name, vocabulary, prompt_end), pieces_of(token_ids, number)) == whole
            if not any(part.kind == "call" for part in whole) and name not in FRAMED:
                kept = "".join(part.text for part in whole)
                assert squeezed(kept) == squeezed(text.replace("<think>", "").replace("</think>", "")) or "think>" in text
            for part in whole:
                if part.kind == "arguments":
                    assert isinstance(orjson.loads(part.text), dict)


def squeezed(text: str) -> str:
    """Return the text without newlines, which belong to no part around sections."""
    return text.replace("\n", "")


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_replay_continues_the_first_life(name: str) -> None:
    """A new life releases the same as the old one after any number of tokens."""
    draw = random.Random(name)
    for vocabulary in vocabularies(name):
        text = "<think>a\n</think>\n\nSee:\n" + "".join(draw.choices(PIECES, k=30))
        token_ids = tokens_of(text, vocabulary)
        for cut in range(0, len(token_ids), 29):
            old, new = opened(name, vocabulary), opened(name, vocabulary)
            for token_id in token_ids[:cut]:
                old.push([token_id])
                old.take_parts()
            new.push(token_ids[:cut])
            new.take_parts()
            assert rest_of(old, token_ids[cut:]) == rest_of(new, token_ids[cut:])
            assert old.num_reasoning_tokens == new.num_reasoning_tokens


def rest_of(stream: PartStream, token_ids: list[int]) -> list[Part]:
    return parse(stream, [[token_id] for token_id in token_ids])


class Lines:
    """Counter of executed Python lines, a measure of work that is the same on every machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self.count += 1
        return self._trace


HOSTILE = {
    "triggers": lambda trigger: trigger,
    "opened": lambda trigger: f'{trigger}\n{{"name": "f", "arguments": {{"a": "',
    "deep": lambda trigger: "[" * 50 + "{" * 50,
    "newlines": lambda trigger: "\n",
    "beginnings": lambda trigger: f"{trigger[:-1]}<thin</thin",
    "values": lambda trigger: "<function=f>\n<parameter=a>\n</parameter",
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_work_is_linear(name: str, kind: str) -> None:
    trigger = (*CALL_FAMILIES[name].triggers, "[")[0]
    vocabulary = vocabulary_of([])

    def work(num_characters: int) -> int:
        text = trigger + (HOSTILE[kind](trigger) * num_characters)[:num_characters]
        with Lines() as lines:
            parse(opened(name, vocabulary), [[token_id] for token_id in text.encode()])
        return lines.count

    assert work(600) < 2.5 * work(300) + 1000


@pytest.mark.slow
def test_hostile_tools() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for level in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "anyOf": [deep]} if level < 6 else {"properties": {"a": deep}}
    many = [
        {"type": "function", "function": {"name": f"f{index}", "parameters": deep if index < 3 else None}}
        for index in range(3_000)
    ]
    tools = orjson.dumps(many)
    assert len(Tools.of(tools).functions) == 3_000
    for name in ONE_OF_EACH_CLASS:
        lark = CALL_FAMILIES[name].grammar(Tools.of(tools), Parsing(choice="required", binds=True), lambda marker: None)
        assert lark.startswith("start:"), name
    strange = {"type": "object", "properties": {"a": 1, "b": {"type": 2}}, "required": 3, "$defs": []}
    odd = orjson.dumps([{"type": "function", "function": {"name": "f", "parameters": strange, "strict": True}}])
    for name, family in CALL_FAMILIES.items():
        assert "start" in family.grammar(Tools.of(odd), Parsing(choice="auto", binds=True), lambda marker: None), name
    assert Tools.of(b"[1]").functions == Tools.of(b"{").functions == {}
    endless: dict[str, Any] = {}
    for _ in range(1000):
        endless = {"type": "object", "properties": {"a": endless}}
    with pytest.raises(RequestError, match="nested too deeply"):
        json_rule(endless, is_strict=False)


WIDE = {"anyOf": [{"$ref": "#/$defs/wide"}] * 300}  # ways through it: 300 to the power of its depth


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "1.5", '"1.5"'),
        ({"type": "number"}, "12", "12"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/x"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/loop"}, "[1]", '"[1]"'),
        ({"$ref": "#/$defs/wide"}, "1", '"1"'),
        ({"$ref": "#/$defs/y~1z"}, "[1]", "[1]"),
        ({"properties": {"b": {"type": "integer"}}}, '{"b": 1}', '{"b": 1}'),
        ({"items": {"type": "integer"}}, "[1]", "[1]"),
        ({"type": "integer", "nullable": True}, "None", "null"),
        ({"type": "string", "nullable": True}, "12", '"12"'),
        ({"minimum": 1}, "12", "12"),
        ({"pattern": "1"}, "12", '"12"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1"]}, "1", '"1"'),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": 7, "anyOf": 3, "enum": 4}, "1", '"1"'),
        (None, "1", '"1"'),
    ],
)
def test_values_have_the_type_of_their_schema(schema: Any, text: str, expected: str) -> None:
    definitions = {"x": {"type": "array"}, "y/z": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}, "wide": WIDE}
    root = {"properties": {"a": schema}, "$defs": definitions}
    assert typed(text, root, "a") == expected
