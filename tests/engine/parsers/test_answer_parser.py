"""Answers split into parts: markers by token and by text, thinking, calls, and text that only resembles one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from engine.messages import Part
from engine.parsers.answer_parser import AnswerParser
from engine.parsers.family import CallFamily, Tools
from engine.parsers.grammar import Lark, MarkerIds
from engine.parsers.reader import Reader, Reading
from engine.parsers.registry import Parsers
from engine.tokenizer.vocabulary import Vocabulary
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

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> \\" <think>", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = {"a": '</tool_call> " <think>', "b": [1, {}]}


@pytest.fixture(params=["tokens", "text"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary_of(MARKERS if request.param == "tokens" else ())


def parts_of(text: str, vocabulary: Vocabulary, prompt_end: str = "", seed: int | None = None, **request: Any) -> list[Part]:
    parsers = Parsers("hermes", "qwen3", vocabulary.pieces)
    token_ids = tokens_of(text, vocabulary)
    pieces = [token_ids] if seed is None else pieces_of(token_ids, seed)
    return parse(stream_of(parsers, vocabulary, submit_of(**({"tools": TOOLS} | request)), prompt_end), pieces)


def test_everything_in_one_answer(vocabulary: Vocabulary) -> None:
    text = f"<think>\nwell\n\nso\n</think>\n\nLook:\n\n{CALL}\n{CALL}\nDone\n"
    whole = parts_of(text, vocabulary)
    assert [part.kind for part in whole] == ["reasoning", "content", "call", "arguments", "call", "arguments", "content"]
    assert reasoning(whole) == "well\n\nso"
    assert [part.text for part in whole if part.kind == "content"] == ["Look:", "Done\n"]
    assert calls(whole) == [("f", ARGUMENTS)] * 2
    assert [part.call_index for part in whole if part.kind == "call"] == [0, 1]
    assert len({part.call_id for part in whole if part.kind == "call"}) == 2
    for seed in range(20):
        assert parts_of(text, vocabulary, seed=seed) == whole


@pytest.mark.parametrize(
    ("text", "prompt_end", "expected"),
    [
        ("a\n</think>\n\nb", "<|im_start|>assistant\n<think>\n", ("a", "b")),
        ("a\n</think>\n\nb", "<think>\n\n</think>\n\n", ("", "a\n\n\nb")),
        ("a </think>b</think>", "", ("", "a b</think>")),
        ("<think>a</think>b</think>", "", ("a", "b</think>")),
        ("\n<think>a", "", ("a", "")),
        ("b <think>a</think>", "", ("", "b <think>a</think>")),
        ("<think>a\n\n", "", ("a", "")),
        ("a</thin", "<think>", ("a</thin", "")),
        ("\nb\n", "", ("", "\nb\n")),
    ],
)
def test_thinking(vocabulary: Vocabulary, text: str, prompt_end: str, expected: tuple[str, str]) -> None:
    parts = parts_of(text, vocabulary, prompt_end)
    assert (reasoning(parts), content(parts)) == expected


def test_end_after_the_budgets_end_is_dropped(vocabulary: Vocabulary) -> None:
    for text, prompt_end in (("a</think>\n\nb</think>c", "<think>"), ("<think>a</think>b</think>c", "")):
        parts = parts_of(text, vocabulary, prompt_end, thinking_token_budget=3)
        assert (reasoning(parts), content(parts)) == ("a", "bc")


def test_truncated_second_call_stays_text(vocabulary: Vocabulary) -> None:
    text = f"{CALL}\n{CALL}"
    token_ids = tokens_of(text, vocabulary)
    parsers = Parsers("hermes", "qwen3", vocabulary.pieces)
    for num_tokens in range(len(token_ids)):
        parts = parse(stream_of(parsers, vocabulary, submit_of(TOOLS)), [token_ids[:num_tokens]])
        assert content(parts) in text, num_tokens


def test_a_call_within_thinking_ends_it(vocabulary: Vocabulary) -> None:
    parts = parts_of(f"hm\n{CALL}\nafter", vocabulary, "<think>")
    assert (reasoning(parts), calls(parts), content(parts)) == ("hm", [("f", ARGUMENTS)], "after")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": "1',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}} and',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}</tool_cally',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}\n</tool_call>',
        "<tool_call>\nnothing\n</tool_call>",
        "<tool_call><tool_call>",
        "<tool_call>",
        "</tool_call> <tool_cal",
    ],
)
def test_malformed_call_is_text(vocabulary: Vocabulary, text: str) -> None:
    assert parts_of(f"Well,\n{text}", vocabulary) == [Part("content", f"Well,\n{text}")]
    assert content(parts_of(text, vocabulary)) == text
    assert reasoning(parts_of(f"Well,\n{text}", vocabulary, "<think>")) == f"Well,\n{text}"


def test_a_call_after_one_that_is_none(vocabulary: Vocabulary) -> None:
    parts = parts_of(f"<tool_call>oh {CALL}", vocabulary)
    assert (content(parts), calls(parts)) == ("<tool_call>oh ", [("f", ARGUMENTS)])


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}',  # unfinished
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool',
        '<tool_call>\n{"name": "f", "arguments": {"a": "1',
        '<tool_call>\n{"name": "f", "arguments": {"a": [1',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}',
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call><",
    ],
)
def test_call_after_a_malformed_one(vocabulary: Vocabulary, broken: str) -> None:
    whole = parts_of(f"{broken}{CALL}", vocabulary)
    assert (content(whole), calls(whole)) == (broken.rstrip("\n"), [("f", ARGUMENTS)])
    for seed in range(5):
        assert parts_of(f"{broken}{CALL}", vocabulary, seed=seed) == whole
    within = parts_of(f"hm {broken}</think>\n\n{CALL}", vocabulary, "<think>")
    assert (content(within), calls(within)) == ("", [("f", ARGUMENTS)])


def test_end_of_thinking_after_calls_is_hidden(vocabulary: Vocabulary) -> None:
    parts = parts_of(f"hm\n{CALL}\n</think>\n\nafter </think>", vocabulary, "<think>")
    assert (reasoning(parts), calls(parts), content(parts)) == ("hm", [("f", ARGUMENTS)], "after </think>")
    parts = parts_of(f"<think>hm{CALL}{CALL}</think>", vocabulary)
    assert (reasoning(parts), len(calls(parts)), content(parts)) == ("hm", 2, "")


def test_leading_space_before_markers_is_dropped(vocabulary: Vocabulary) -> None:
    assert [part.kind for part in parts_of(f" \n {CALL}", vocabulary)] == ["call", "arguments"]
    assert parts_of(" <think>a</think>b", vocabulary) == [Part("reasoning", "a"), Part("content", "b")]
    assert parts_of(" \n b ", vocabulary) == [Part("content", " \n b ")]
    assert parts_of(" \n ", vocabulary) == [Part("content", " \n ")]


@pytest.mark.parametrize("seed", range(3))
def test_held_newlines_are_checked_for_stop_strings(vocabulary: Vocabulary, seed: int) -> None:
    """A stop string is found at the token that completes it, whatever follows."""
    for follows in (CALL, "more", "\n", ""):
        text = f"a</think>\n\nb\n\n{follows}"
        stream = stream_of(
            Parsers("hermes", "qwen3", vocabulary.pieces), vocabulary, submit_of(TOOLS, stop=["\n\n"]), "<think>"
        )
        parts = parse(stream, pieces_of(tokens_of(text, vocabulary), seed))
        assert (reasoning(parts), content(parts), calls(parts)) == ("a", "b", [])
        assert stream.stop_string == "\n\n"
        assert stream.num_tokens == len(tokens_of("a</think>\n\nb\n\n", vocabulary))
    included = submit_of(TOOLS, stop=["\n\n"])
    included.text = msgspec.structs.replace(included.text, include_stop_str_in_output=True)
    stream = stream_of(Parsers("hermes", "qwen3", vocabulary.pieces), vocabulary, included)
    assert content(parse(stream, [tokens_of(f"b\n\n{CALL}", vocabulary)])) == "b\n\n"
    assert content(parts_of(f"b\n{CALL}", vocabulary, stop=["\n\n"])) == "b"
    assert content(parts_of(f"b\nEN{CALL}", vocabulary, stop=["END"])) == "b\nEN"


def test_parts_have_their_token_ranges(vocabulary: Vocabulary) -> None:
    """Tokens of markers, and of newlines outside of parts, belong to no part; those of a stream equal those of the whole."""
    text = f"<think>\nwell\n\n</think>\n\nLook:\n{CALL}\nDone"
    token_ids = tokens_of(text, vocabulary)

    def spans(pieces: Iterable[Sequence[int]]) -> dict[str, str]:
        stream = stream_of(Parsers("hermes", "qwen3", vocabulary.pieces), vocabulary, submit_of(TOOLS))
        found: dict[str, list[int]] = {}
        num_known = 0
        for piece in [*pieces, None]:
            text = stream.finish() if piece is None else stream.push(piece)
            parts = stream.take_parts() or ([Part("content", text, begin=num_known, end=stream.num_tokens)] if text else [])
            for part in parts:
                found.setdefault(part.kind, []).extend(range(part.begin, part.end))
                num_known = part.end
        assert len({place for places in found.values() for place in places}) == sum(map(len, found.values()))
        return {kind: b"".join(vocabulary.bytes_of(token_ids[place]) for place in found[kind]).decode() for kind in found}

    for pieces in ([token_ids], *(pieces_of(token_ids, seed) for seed in range(5)), [[token_id] for token_id in token_ids]):
        found = spans(pieces)
        assert (found["content"], found["reasoning"]) == ("Look:Done", "well")


def test_spelled_markers_are_text_if_tokens_exist() -> None:
    vocabulary = vocabulary_of(MARKERS)
    parsers = Parsers("hermes", "qwen3", vocabulary.pieces)
    parts = parse(stream_of(parsers, vocabulary, submit_of(TOOLS)), [list(f"<think>a</think>{CALL}".encode())])
    assert parts == [Part("content", f"<think>a</think>{CALL}")]


def test_one_call_alone_ends_the_answer(vocabulary: Vocabulary) -> None:
    stream = stream_of(Parsers("hermes", "none", vocabulary.pieces), vocabulary, submit_of(TOOLS, is_parallel=False))
    num_tokens = len(tokens_of(CALL, vocabulary))
    parts = parse(stream, pieces_of(tokens_of(f"{CALL}\n{CALL}", vocabulary), 3))
    assert (calls(parts), stream.is_over, stream.stop_string) == ([("f", ARGUMENTS)], True, None)
    assert stream.num_tokens == num_tokens


def test_unknown_tool_is_not_called(vocabulary: Vocabulary) -> None:
    parts = parts_of(CALL, vocabulary, names=["g"])
    assert parts == [Part("content", CALL)]


def test_stop_strings_are_sought_in_content(vocabulary: Vocabulary) -> None:
    text = f"END?</think>It is {CALL} en\nEND more"
    parts = parts_of(text, vocabulary, "<think>", stop=["END", "f"])
    assert (reasoning(parts), content(parts), calls(parts)) == ("END?", "It is  en\n", [("f", ARGUMENTS)])


def test_tokens_of_thinking_are_counted() -> None:
    vocabulary = vocabulary_of(MARKERS)
    stream = stream_of(Parsers("none", "qwen3", vocabulary.pieces), vocabulary, submit_of())
    stream.push(tokens_of("<think>abc</think>defg", vocabulary))
    assert stream.num_reasoning_tokens == 5


def test_meaningless_special_markers_stay_hidden() -> None:
    vocabulary = vocabulary_of(MARKERS, special=MARKERS)
    parts = parts_of("a</tool_call></think>b", vocabulary)
    assert parts == [Part("content", "ab")]


def test_no_stop_string_reaches_over_a_call(vocabulary: Vocabulary) -> None:
    parts = parts_of(f"EN{CALL}D and more", vocabulary, stop=["END"])
    assert [part.text for part in parts if part.kind == "content"] == ["EN", "D and more"]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "mistral", "qwen3_coder", "pythonic", "llama3_json"])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_call_after_a_malformed_one_in_each_family(name: str, has_tokens: bool) -> None:
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    broken, good = {
        "deepseek_v3": (
            f"<｜tool▁calls▁begin｜>{begin}function{separator}f\n```json\n{{1}}\n```{end}\n",
            f'{begin}function{separator}f\n```json\n{{"a": 1}}\n```{end}<｜tool▁calls▁end｜>',
        ),
        "deepseek_v31": (
            f"<｜tool▁calls▁begin｜>{begin}f{separator}{{",
            f'<｜tool▁calls▁begin｜>{begin}f{separator}{{"a": 1}}{end}<｜tool▁calls▁end｜>',
        ),
        "mistral": ('[TOOL_CALLS]f[ARGS]{"b": 1', '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        "qwen3_coder": (
            "<tool_call>\n<function=g>\n",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        "pythonic": ("<|tool_call_start|>[f(a=1,", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
        "llama3_json": ('<|python_tag|>{"name": "f"', '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    }[name]
    family = CALL_FAMILIES[name]
    vocabulary = vocabulary_of([*family.triggers, *family.markers] if has_tokens else [])
    typed = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    for seed in range(3):
        stream = stream_of(Parsers(name, "none", vocabulary.pieces), vocabulary, submit_of(typed))
        parts = parse(stream, pieces_of(tokens_of(broken + good, vocabulary), seed))
        assert calls(parts) == [("f", {"a": 1})], content(parts)
        assert content(parts) == broken.rstrip("\n")


@pytest.mark.parametrize("space", ["", " ", "\n", " \n "])
@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_call_without_marker_may_follow_space(name: str, space: str) -> None:
    answer = {"llama3_json": '{"name": "f", "parameters": {}}', "pythonic": "[f()]"}[name]
    for pieces in ([space + answer], [space, answer], [*space, *answer]):
        vocabulary = vocabulary_of([])
        stream = stream_of(Parsers(name, "none", vocabulary.pieces), vocabulary, submit_of(TOOLS))
        parts = parse(stream, [list(piece.encode()) for piece in pieces])
        assert (calls(parts), content(parts)) == ([("f", {})], "")


class Broken(CallFamily):
    """Family of a plugin that fails: before the first character, when it has read one, or because it reads nothing."""

    name = "broken"
    triggers = ("@@",)

    def __init__(self, when: str) -> None:
        self._when = when

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        if self._when == "at once":
            raise ZeroDivisionError
        return self._read(reader) if self._when == "later" else None  # type: ignore[return-value]

    def _read(self, reader: Reader) -> Reading[None]:
        yield from reader.literal("f ")
        raise KeyError("f")

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Any, id_of: MarkerIds, strict: bool) -> str:
        raise AssertionError


@pytest.mark.parametrize("when", ["at once", "later", "never"])
@pytest.mark.parametrize("text", ["a @@f {} b @@f", "@@", "@@f ", "a @@f {}@@f {}\n"])
def test_call_that_breaks_its_parser_is_content(when: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """One parser of a plugin would otherwise end the tokenizer, again after each restart, and then the engine."""
    for size in (1, 3, len(text)):
        parser = AnswerParser(call_family=Broken(when), thinking=None, tools=lambda: Tools({}))
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
        parser.finish()
        assert content(parser.take()) == text
        assert parser.num_malformed == text.count("@@")
    assert ("the parser broken failed" in caplog.text) == (when != "later" or "f " in text)
