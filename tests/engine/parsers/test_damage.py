"""Damage that models produce: read where it is unambiguous, otherwise content, unchanged."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from engine.parsers.python_literals import python_value
from engine.parsers.registry import Parsers
from tests.engine.parsers.answers import (
    CALL_FAMILIES,
    calls,
    content,
    parse,
    pieces_of,
    reasoning,
    stream_of,
    submit_of,
    tokens_of,
    vocabulary_of,
)

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in "fg"
]
HEAD, A, B = "<function=f>\n", "<parameter=a>\n1\n</parameter>\n", "<parameter=b>\nx\n</parameter>\n"
QWEN_F = f"<tool_call>\n{HEAD}{A}</function>\n</tool_call>"
QWEN_G = f"<tool_call>\n<function=g>\n{B}</function>\n</tool_call>"


def read(name: str, text: str, has_tokens: bool = False, thinking: str = "none") -> tuple[list[tuple[str, Any]], str]:
    """Return the calls and the content of an answer, the same however it is cut."""
    family = CALL_FAMILIES[name]
    vocabulary = vocabulary_of([*family.triggers, *family.markers] if has_tokens else [])
    parsers = Parsers(name, thinking, vocabulary.pieces)
    token_ids = tokens_of(text, vocabulary)
    whole = parse(stream_of(parsers, vocabulary, submit_of(TOOLS)), [token_ids])
    for seed in range(4):
        assert parse(stream_of(parsers, vocabulary, submit_of(TOOLS)), pieces_of(token_ids, seed)) == whole
    assert parse(stream_of(parsers, vocabulary, submit_of(TOOLS)), [[token_id] for token_id in token_ids]) == whole
    return calls(whole), content(whole)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEAD}{A}</function>\n</tool_call>", [("f", {"a": 1})]),
        (f"{HEAD}{A}</function>", [("f", {"a": 1})]),
        (f"{HEAD}{A}</function>\n<function=g>\n{B}</function>\n</tool_call>", [("f", {"a": 1}), ("g", {"b": "x"})]),
        (f"<tool_call>\n{HEAD}<parameter=a>\n1\n{B}</function>\n</tool_call>", [("f", {"a": 1, "b": "x"})]),
        (f"<tool_call>\n{HEAD}<parameter=a>\n1\n<parameter=b>\nx\n</function>\n</tool_call>", [("f", {"a": 1, "b": "x"})]),
        (f"<tool_call>\n{HEAD}<parameter=b>\nx\n</function>", [("f", {"b": "x"})]),
        (f"<tool_call>\n{HEAD}<parameter=b>\nx\n</function>\n</tool_call>\n{QWEN_F}", [("f", {"b": "x"}), ("f", {"a": 1})]),
        (f"<tool_call>\n{HEAD}{A}</tool_call>", [("f", {"a": 1})]),
        (f"<tool_call>\n{HEAD}{A}</tool_call>\n{QWEN_G}", [("f", {"a": 1}), ("g", {"b": "x"})]),
        (f"<tool_call>\n{HEAD}{A}</function>", [("f", {"a": 1})]),
        (f"<tool_call>\n{HEAD}{A}</function>\n", [("f", {"a": 1})]),
        (f"{QWEN_F}\n<tool_call>\n<function=g>\n{B}</function>\n", [("f", {"a": 1}), ("g", {"b": "x"})]),
        (f"<tool_call>\n{HEAD}{A}</function>\n<function=g>\n</function>\n</tool_call>", [("f", {"a": 1}), ("g", {})]),
        (f"<tool_call>\n{HEAD}</function>", [("f", {})]),
    ],
)
def test_damaged_qwen_calls_are_read(has_tokens: bool, text: str, expected: list[tuple[str, Any]]) -> None:
    assert read("qwen3_coder", text, has_tokens) == (expected, "")
    assert read("qwen3_coder", f"Well:\n{text}", has_tokens) == (expected, "Well:")


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=f> in the answer.",
        f"<function=h>\n{A}</function>",
        f"{HEAD}{A}",
        f"<tool_call>\n{HEAD}{A}",
        f"<tool_call>\n{HEAD}<parameter=b>\nx",
        f"<tool_call>\n{HEAD}<parameter=b>\nx</function> and",
        f"<tool_call>\n{HEAD}{A}</function> and",
        f"<tool_call>\n{HEAD}{A}oh",
    ],
)
def test_ambiguous_qwen_text_is_content(text: str) -> None:
    assert read("qwen3_coder", text) == ([], text)


@pytest.mark.parametrize(
    "value",
    [
        "see <parameter=c>",
        "x\n<parameter=d>\ny",
        "x\n<parameter=b>\ny",
        "<parameter",
        "x</function>",
        "x\n</function>\n</tool_call>\nmore",
        "x\n</function>\nmore",
        "</function>\n</tool_cal",
        "<tool_call>\n</tool_call>",
    ],
)
def test_tags_within_a_qwen_value_stay(value: str) -> None:
    text = f"<tool_call>\n{HEAD}<parameter=b>\n{value}\n</parameter>\n{A}</function>\n</tool_call>"
    assert read("qwen3_coder", text) == ([("f", {"b": value, "a": 1})], "")


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("has_tokens", [False, True])
def test_hermes_without_the_last_tag_is_read(has_tokens: bool) -> None:
    once = [("f", {"a": 1})]
    for end in ("", "\n", "\n</tool_cal", "</", " </tool_call>"):
        assert read("hermes", f"{CALL}{end}", has_tokens and "cal" not in end and end != "</") == (once, "")
        assert read("hermes", f"{CALL}\n</tool_call>\n{CALL}{end}") == (once * 2, "")
    for text in (f"{CALL} or", f"{CALL}\n{CALL} or", CALL[:-1], f"{CALL}}}"):
        assert read("hermes", text, has_tokens) == ([], text)


def test_llama_calls_may_be_on_lines() -> None:
    one = '{"name": "f", "parameters": {"a": 1}}'
    for separator in ("\n", "\n\n", " \n ", "; ", ",\n", ";"):
        assert read("llama3_json", f"{one}{separator}{one}") == ([("f", {"a": 1})] * 2, "")
        assert read("llama3_json", f"<|python_tag|>{one}{separator}{one}\n") == ([("f", {"a": 1})] * 2, "")
    assert read("llama3_json", f"{one} {one}") == ([("f", {"a": 1})], one)
    assert read("llama3_json", f"{one}\nDone") == ([("f", {"a": 1})], "Done")
    other = '{"other": 1}'
    assert read("llama3_json", f"{one}\n{other}")[0] == [("f", {"a": 1})]
    assert other in read("llama3_json", f"{one}\n{other}")[1]


PYTHON_LITERALS = [  # evaluated by Python itself
    '"""x"""',
    '"""a "quoted" ""b"""',
    "'''a\n'b'''",
    '""',
    "''",
    '"a" "b"',
    "'a' \"b\"\n'c'",
    '("a"\n "b")',
    'r"\\d+\\n"',
    "R'\\''",
    'u"x"',
    '"a" r"\\b"',
    "1_000",
    "1_0.5_0",
    ".5",
    "-.5e-3",
    "5.",
    "1e3",
    "+7",
    "-0",
    "00",
    "0x1F",
    "-0xff",
    "0o17",
    "0b1_01",
    "{1: 2}",
    '{1.5: "x", None: [True, False], True: ()}',
    "{'k': {}}",
    '"\\x41\\u00e9\\U0001F600\\101\\0\\N{LATIN SMALL LETTER A}\\q\\\\\\n\\t\\a\\v\\\n"',
    "(1, 2)",
    "(1,)",
    "[1, [2, 'x',],]",
    '"\\ud83d\\ude00"',
]
NO_LITERALS = [
    "b'x'",
    "f'x'",
    "rb'x'",
    "x",
    "1__0",
    "_1",
    "0x",
    "007",
    "1+2",
    "{1, 2}",
    "{1: }",
    "'a' b",
    "inf",
    "1_",
    "'\\N{nothing}'",
    "'a",
    "'\\xg1'",
    "{(1, 2): 3}",
    "..",
    "e5",
    "0o8",
    "a()",
    "--1",
    "'a'.upper()",
]


@pytest.mark.parametrize("text", PYTHON_LITERALS)
def test_python_literals_have_pythons_value(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unknown escapes
        expected = json.loads(json.dumps(eval(f"(\n{text}\n)")))
    if text == '"\\ud83d\\ude00"':
        expected = "😀"
    assert read("pythonic", f"[f(c={text}), g()]") == ([("f", {"c": expected}), ("g", {})], "")
    assert read("pythonic", f"<|tool_call_start|>[f(b='', c=[{text}, {{'k': {text}}}])]<|tool_call_end|>", has_tokens=True) == (
        [("f", {"b": "", "c": [expected, {"k": expected}]})],
        "",
    )


@pytest.mark.parametrize("text", NO_LITERALS)
def test_what_is_no_python_literal_is_content(text: str) -> None:
    answer = f"[f(c={text})]"
    assert read("pythonic", answer) == ([], answer)


def test_ends_that_others_leave_out() -> None:
    one = [("f", {"a": 1})]
    for name, text in (
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]'),
        ("nemotron", '<TOOLCALL>{"name": "f", "arguments": {"a": 1}}</TOOLCALL>'),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}]'),
        ("command_a", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]'),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]'),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>'),
        ("hunyuan_a13b", '<tool_calls>\n<tool_call>f\n```json\n{"a": 1}\n```\n</tool_call>\n</tool_calls>'),
        ("gemma4", "<|tool_call>call:f{a: 1 }"),
        ("functionary_v31", '<function=f>{"a": 1}'),
        ("functionary_v32", 'f\n{"a": 1}'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>'),
        (
            "deepseek_v3",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        ),
    ):
        for has_tokens in (False, True):
            assert read(name, text, has_tokens) == (one, ""), name


def test_ids_of_kimi_calls_are_the_models() -> None:
    vocabulary = vocabulary_of([])
    text = "<|tool_calls_section_begin|>"
    for number in (4, 5):
        text += f'<|tool_call_begin|>functions.f:{number}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
    parts = parse(
        stream_of(Parsers("kimi_k2", "none", vocabulary.pieces), vocabulary, submit_of(TOOLS)),
        [tokens_of(f"{text}<|tool_calls_section_end|>", vocabulary)],
    )
    assert [part.call_id for part in parts if part.kind == "call"] == ["functions.f:4", "functions.f:5"]


ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is\n\nnice.<|return|>"


@pytest.mark.parametrize("has_tokens", [False, True])
def test_harmony_messages_go_to_their_channels(has_tokens: bool) -> None:
    family = CALL_FAMILIES["harmony"]
    vocabulary = vocabulary_of([*family.triggers, *family.markers] if has_tokens else [])

    def parts_of(text: str, calls_name: str = "harmony", thinking: str = "harmony", tools: Any = TOOLS, **parsing: Any) -> Any:
        parsers = Parsers(calls_name, thinking, vocabulary.pieces)
        token_ids = tokens_of(text, vocabulary)
        streams = [stream_of(parsers, vocabulary, submit_of(tools, **parsing), "<|start|>assistant") for _ in range(3)]
        whole = parse(streams[0], [token_ids])
        assert parse(streams[1], pieces_of(token_ids, 1)) == whole
        assert parse(streams[2], [[token_id] for token_id in token_ids]) == whole
        return reasoning(whole), content(whole), calls(whole)

    assert parts_of(f"{ANALYSIS}{FINAL}") == ("I think.", "It is\n\nnice.", [])
    one = [("f", {"a": 1})]
    heads = (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    )
    for head in heads:
        for end in ("", "<|call|>", "<|end|>"):
            text = f'{ANALYSIS}{SAID}{head}{{"a": 1}}{end}'
            assert parts_of(text) == ("I think.", "Let me see.", one), text
    assert parts_of(f'{heads[4]}{{"a": 1}}<|call|>') == ("", "", one)
    assert parts_of(f"{heads[1]}<|call|>") == ("", "", [("f", {})])
    assert parts_of("the answer to=it") == ("", "the answer to=it", [])
    assert parts_of("Plain.") == ("", "Plain.", [])
    assert parts_of(f"{ANALYSIS}{FINAL}", "none") == ("I think.", "It is\n\nnice.", [])
    assert parts_of(f"{ANALYSIS}{FINAL}", "harmony", "none") == ("", "I think.It is\n\nnice.", [])
    broken = f'{heads[0]}{{"a": 1'
    assert parts_of(f"{ANALYSIS}{broken}") == ("I think.", f"<|start|>assistant{broken}", [])
    assert parts_of(f'{heads[0]}{{"a": 1}}', tools=(), thinking="harmony")[2] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("mistral", "[THINK]so[/THINK]Yes", ("so", "Yes")),
        ("seed_oss", "<seed:think>\nso</seed:think>\nYes", ("so", "Yes")),
        ("gemma4", "<|channel>thought\nso\n<channel|>Yes", ("so", "Yes")),
        ("gemma4", "<|channel>though<channel|>Yes", ("", "Yes")),
        ("gemma4", "<|channel>other\n<channel|>Yes", ("other", "Yes")),
        ("apertus", "<|inner_prefix|>so<|inner_suffix|>Yes", ("so", "Yes")),
        ("command_a", "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", ("so", "Yes")),
        ("command_a", "<|START_THINKING|>so<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("so", "Yes")),
        ("hunyuan_a13b", "<think>\nso\n</think>\n<answer>\nYes\n</answer>", ("so", "Yes")),
    ],
)
def test_reasoning_of_each_family(name: str, text: str, expected: tuple[str, str]) -> None:
    markers = ("[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<seed:think>", "</seed:think>")
    for vocabulary in (vocabulary_of([]), vocabulary_of(markers)):
        parsers = Parsers("none", name, vocabulary.pieces)
        token_ids = tokens_of(text, vocabulary)
        for pieces in ([token_ids], [[token_id] for token_id in token_ids]):
            parts = parse(stream_of(parsers, vocabulary, submit_of()), pieces)
            assert (reasoning(parts), content(parts)) == expected


@pytest.mark.parametrize("text", ["<tool_call>{}</tool_call>", '<tool_call>{"name":"f"}</tool_call>'])
def test_json_is_no_name_of_a_glm_function(text: str) -> None:
    vocabulary = vocabulary_of([])
    stream = stream_of(Parsers("glm45", "none", vocabulary.pieces), vocabulary, submit_of([{"function": {"name": "f"}}]))
    assert content(parse(stream, [tokens_of(text, vocabulary)])) == text


@pytest.mark.parametrize(("literal", "value"), [("007.5", "7.5"), ("00.5", "0.5"), ("0_0.5", "0.5"), ("-01e2", "-1.0e2")])
def test_leading_zeros_of_python_floats_are_dropped(literal: str, value: str) -> None:
    assert python_value(literal) == value
