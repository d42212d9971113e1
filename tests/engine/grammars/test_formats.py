"""Structured output of a request as a grammar: accepted and rejected answers, and refused formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.grammars.formats import HEAD, lark_of
from engine.grammars.matcher import Matcher, MatcherLimits, MatcherVocabulary
from engine.grammars.matching import MAX_KEPT, Matching
from engine.grammars.tokens import GrammarTokens
from engine.messages import AnswerFormat, Grammar
from engine.tokenizer.answer_formats import AnswerFormats

END, CALL = 256, 257
TOKENS = GrammarTokens.of(
    [bytes([byte]) for byte in range(256)] + [b"<end>", b"<call>", b" \n"], [END], [CALL, 258], [END], 300
)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAGGED = {"structures": [{"begin": "<call>f(", "schema": POINT, "end": ")"}], "triggers": ["<call>"]}
NAMED = {"structures": [{"begin": f"<f{name}>", "schema": POINT, "end": "</f>"} for name in "ab"], "triggers": ["<f"]}

EITHER = {"type": "or", "elements": [{"type": "json_schema", "json_schema": POINT}, {"type": "regex", "pattern": "n+"}]}
SEQUENCE = {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<call>x="}, EITHER]}}


def tags(**options: Any) -> str:
    number = {"type": "regex", "pattern": "[0-9]+"}
    tag = {"type": "tag", "begin": "#n", "content": number, "end": ";"}
    other = {"type": "tag", "begin": "#t", "content": {"type": "any_text"}, "end": "END"}
    return json.dumps({"format": {"type": "triggered_tags", "triggers": ["#"], "tags": [tag, other], **options}})


@pytest.fixture(scope="module")
def matching() -> Matching:
    return Matching(TOKENS)


def compiled(formats: AnswerFormats, format_: AnswerFormat) -> Grammar:
    return formats.grammar(formats.lark(format_), format_.param)


def is_taken(matching: Matching, format_: AnswerFormat, text: str) -> bool:
    matcher = matching.matcher(HEAD + lark_of(format_, TOKENS.marks()))
    assert not matcher.is_error(), matcher.error()
    pieces = text.split("<call>")
    token_ids = list(pieces[0].encode())
    for piece in pieces[1:]:
        token_ids += [CALL, *piece.encode()]
    return matcher.consume(*token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("json", json.dumps(POINT), ['{"x":1}', '{"x": -1}', '{\n  "x": 1\n}'], ['{"x":"1"}', "{}", '{"x":1,"y":2}', '{"x":1']),
        ("json", json.dumps(POINT), [], ['{"x":\n\n1}', '{ "x":  1}']),
        ("json", "true", ["1", "null", '"a"', "[1, {}]"], ["", "nul", "[1,]"]),
        ("regex", "a/[0-9]{2}\n", ["a/12\n"], ["a/1\n", "a/12", "a/123\n"]),
        ("regex", "^ab$", ["ab"], ["abc", ""]),
        ("choice", '["yes", "no", "n\\"\\u00e9\\ud83d\\ude00"]', ["yes", "no", 'n"é😀'], ["", "y", "yesno"]),
        ("grammar", 'start: "a" n+\nn: /[0-9]/', ["a1", "a12"], ["a", "1"]),
        ("grammar", 'root ::= "a" n+ # numbers\nn ::= [0-9] | "-"\n', ["a1", "a1-"], ["a", "1"]),
        ("structural_tag", json.dumps(TAGGED), ["", "hi", 'a<call>f({"x": 3}) and'], ["<call>", "<call>g", '<call>f({"x": 3}']),
        ("structural_tag", json.dumps(NAMED), ["<", 'see <fa>{"x": 3}</f><fb>{"x":4}</f>.'], ["<f", "<fc>", "<fa>1</f>"]),
        ("structural_tag", tags(), ["", "a #n12; b #tany thing; END #n1;"], ["#", "#n;", "#tx", "#x"]),
        ("structural_tag", tags(at_least_one=True, excludes=[]), ["a #n12; b"], ["", "a"]),
        ("structural_tag", tags(at_least_one=True, stop_after_first=True), ["a #n12;"], ["", "a #n12;b"]),
        (
            "structural_tag",
            json.dumps(SEQUENCE),
            ['<call>x={"x":1}', "<call>x=nn"],
            ["", "<call>x=", "x=n", "<call>x=m"],
        ),
    ],
)  # fmt: skip
def test_format_accepts_and_rejects(matching: Matching, kind: Any, text: str, right: list[str], wrong: list[str]) -> None:
    format_ = AnswerFormat(kind, text, "x")
    assert [each for each in right if not is_taken(matching, format_, each)] == []
    assert [each for each in wrong if is_taken(matching, format_, each)] == []


def test_whitespace_is_as_it_was_asked_for(matching: Matching) -> None:
    texts = ['{"x":1}', '{"x": 1}', '{"x":\t\t\n1}']
    for whitespace, num_taken in ((None, 2), ("", 1), (r"[ \t\n]+", 3)):
        format_ = AnswerFormat("json", json.dumps(POINT), "x", whitespace)
        assert [is_taken(matching, format_, text) for text in texts] == [index < num_taken for index in range(3)]


def nested(depth: int, opening: str, middle: str, closing: str) -> str:
    return opening * depth + middle + closing * depth


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("json", "  ", "empty"),
        ("json", '{"type"', "not valid JSON"),
        ("json", "[1]", "not list"),
        ("json", '{"minimum": NaN}', "NaN"),
        ("json", '{"$ref": "https://example.com/x.json"}', "example.com"),
        ("json", '{"$ref": "file:///etc/passwd"}', "passwd"),
        ("json", '{"$ref": "#"}', "no output"),
        ("json", '{"not": {"type": "string"}}', "not"),
        ("strict", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("strict", '{"type": "object", "propertyNames": {"pattern": "a"}}', "propertyNames"),
        ("json", '{"type": "object", "properties": {"a": {"const": 9007199254740993}}, "minProperties": 1}', "2^53"),
        ("json", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("json", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("json", "false", "Unsatisfiable"),
        ("json", nested(2000, '{"items":', "true", "}"), "nested"),
        ("json", json.dumps({"properties": {f"p{index}": True for index in range(4000)}}), "grammar size"),
        ("json", json.dumps({"enum": ["x" * 1000] * 70}), "limit is 65536"),
        ("json", json.dumps({"patternProperties": {f"^x{index}": True for index in range(150)}}), "patternProperties"),
        ("json", json.dumps({"items": {"type": "integer", "multipleOf": 99991}}), "multipleOf"),
        ("json", json.dumps({"anyOf": [{"minimum": index} for index in range(200)]}), "minimum"),
        ("grammar", 'start: %json {"multipleOf": 99991}', "multipleOf"),
        ("grammar", "start: /a\0/", "NUL"),
        ("json", '{"enum": ["\\ud800"]}', "an unpaired surrogate"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", "(", "regex"),
        ("choice", "[]", "non-empty list"),
        ("choice", '["a", ""]', "empty"),
        ("choice", "[1]", "list of strings"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "x: /a/", "start"),
        ("grammar", 'start: <[999]> "x"', "999"),
        ("grammar", "%import ../../etc/passwd\nstart: /a/", "error"),
        ("grammar", nested(5000, "(", '"a"', ")").join(("root ::= ", "\n")), "nested"),
        ("grammar", "root ::= [", "GBNF"),
        ("structural_tag", "{}", "neither"),
        ("structural_tag", '{"format": {"type": "triggered_tags", "tags": ["x"], "triggers": ["x"]}}', "a tag has"),
        ("structural_tag", '{"structures": [{"begin": "x"}], "triggers": ["y"]}', "no tag starts"),
        ("structural_tag", '{"structures": [{"begin": "x"}, {"begin": "z"}], "triggers": ["x"]}', "any of the triggers"),
        ("structural_tag", '{"structures": [], "triggers": []}', "one tag and one trigger"),
        ("structural_tag", '{"format": {"type": "qwen_xml"}}', "not supported"),
        ("structural_tag", '{"format": {"type": "any_text", "excludes": ["a"]}}', "'excludes' is not supported in a format"),
        ("structural_tag", '{"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}', "'style'"),
        ("structural_tag", tags(excludes=["END"]), "'excludes'"),
        ("structural_tag", nested(900, '{"format": {"type": "or", "elements": [', "", "]}}"), ""),
    ],
)  # fmt: skip
def test_invalid_format_is_refused_with_its_cause(tmp_path: Path, kind: Any, text: str, cause: str) -> None:
    formats = AnswerFormats(lambda: TOKENS, tmp_path / "vocabulary", 65536)
    with pytest.raises(RequestError, match="field cannot be used: ") as caught:
        compiled(formats, AnswerFormat("json" if kind == "strict" else kind, text, "field", is_strict=kind == "strict"))
    assert caught.value.status == 400
    assert caught.value.param == "field"
    assert cause in caught.value.message
    assert len(caught.value.message) < 1000


def test_the_vocabulary_is_written_for_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary"
    formats = AnswerFormats(lambda: TOKENS, path, 65536, b"end")
    assert not path.exists()
    grammar = compiled(formats, AnswerFormat("regex", "a", "x"))
    assert GrammarTokens.read(path) == TOKENS
    assert grammar.end_of_thinking == b"end"
    assert sorted(path.parent.iterdir()) == [path]
    assert (TOKENS.special_ids, TOKENS.marks()) == ([END, CALL], {"<end>": END, "<call>": CALL})
    assert TOKENS.num_tokens == 300


def test_model_without_text_has_no_formats(tmp_path: Path) -> None:
    formats = AnswerFormats(lambda: GrammarTokens.of([b""] * 9, [], [], [3], 9), tmp_path / "vocabulary", 65536)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        compiled(formats, AnswerFormat("regex", "a", "x"))


def test_reused_grammar_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank must not compile a matcher again that its scheduler relies on, however many formats came in between."""
    made: list[str] = []
    make = MatcherVocabulary.matcher

    def counted(self: MatcherVocabulary, grammar: str, limits: MatcherLimits) -> Matcher:
        made.append(grammar)
        return make(self, grammar, limits)

    monkeypatch.setattr(MatcherVocabulary, "matcher", counted)
    matching = Matching(TOKENS)
    first = "start: /a/"
    for number in range(MAX_KEPT + 1):
        assert not matching.matcher(first).is_error()
        matching.prepare(f"start: /b{number}/")
    assert not matching.matcher(first).is_error()
    assert made.count(first) == 1
    matching.prepare("start: /b0/")
    assert made.count("start: /b0/") == 2, "an unused grammar is not kept"
