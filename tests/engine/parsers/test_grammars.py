"""Grammars that enforce calls: each allows what its family's parser reads, and only the requested calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.grammars.formats import HEAD, lark_of
from engine.grammars.matching import Matching
from engine.grammars.tokens import GrammarTokens
from engine.messages import AnswerFormat, Parsing
from engine.parsers.registry import Parsers
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.parsers.answers import CALL_FAMILIES, calls, content, parse, stream_of, submit_of, tokens_of, vocabulary_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "flags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
STRICT = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}, TOOLS[1]]
HAVING_TOKENS = [name for name in CALL_FAMILIES if name not in ("llama3_json", "pythonic")]
ANSWERS = {  # a call of get_weather({"place": "Rome", "days": 3}), as the family writes it
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"place": "Rome", "days": 3}}',
    "pythonic": '[get_weather(place="Rome", days=3)]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"place": "Rome", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"place": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"place": "Rome", "days": 3}',
}
ANSWERS["ernie45"] = ANSWERS["hermes"]
_OBJECT = '{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}'
_SHARED = (
    '<{0}invoke name="get_weather">\n<{0}parameter name="place"{1}>Rome</{0}parameter>\n'
    '<{0}parameter name="days"{2}>3</{0}parameter>\n</{0}invoke>\n'
)
_DSML = _SHARED.format("｜DSML｜", ' string="true"', ' string="false"')
ANSWERS |= {
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜tool_calls>",
    "minimax_m2": f"<minimax:tool_call>\n{_SHARED.format('', '', '')}</minimax:tool_call>",
    "minimax_m1": f"<tool_calls>\n{_OBJECT}\n</tool_calls>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=place>Rome</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"place": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": '<|tool_call>call:get_weather{place:<|"|>Rome<|"|>,days:3}<tool_call|>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + '{"place": "Rome", "days": 3}',
    "granite": f"<|tool_call|>[{_OBJECT}]",
    "phi4_mini_json": f"functools[{_OBJECT}]",
    "nemotron": f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>",
    "hunyuan_a13b": f"<tool_calls>[{_OBJECT}]</tool_calls>",
    "apertus": '<|tools_prefix|>[{"get_weather": {"place": "Rome", "days": 3}}]<|tools_suffix|>',
    "command_a": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"place": "Rome", '
    '"days": 3}}\n]<|END_ACTION|>',
    "command_r": 'Action:\n```json\n[\n    {"tool_name": "get_weather", "parameters": {"place": "Rome", "days": 3}}\n]\n```',
    "functionary_v31": '<function=get_weather>{"place": "Rome", "days": 3}</function>',
    "functionary_v32": 'get_weather\n{"place": "Rome", "days": 3}',
    "json": '[{"name": "get_weather", "parameters": {"place": "Rome", "days": 3}}]',
}
MADE = [("get_weather", {"place": "Rome", "days": 3})]
EOS = "</s>"
VALUE_ENDS = ("\n</parameter>\n", "</｜DSML｜parameter>\n", "</arg_value>\n", '<|"|>', "<|end|>")  # random letters give none
SAID = {"harmony": "<|channel|>final<|message|>{}", "functionary_v32": "all\n{}"}  # a text to the user, if not as it is


class Forced:
    """A family with a vocabulary and its grammars."""

    def __init__(self, name: str, has_tokens: bool) -> None:
        family = CALL_FAMILIES[name]
        self.has_tokens = has_tokens
        markers = [*family.triggers, *family.markers] if has_tokens else []
        self.vocabulary: Vocabulary = vocabulary_of([*markers, EOS], special=[EOS])
        self.parsers = Parsers(name, "none", self.vocabulary.pieces)
        self.end_id = self.vocabulary.size - 1
        tokens = GrammarTokens.of(
            self.vocabulary.token_bytes,
            self.vocabulary.special_ids,
            self.vocabulary.verbatim_ids,
            [self.end_id],
            self.vocabulary.size,
        )
        self.matching = Matching(tokens)

    def matcher(self, tools: Sequence[Any], form: str = "", **parsing: Any) -> Any:
        lark = self.parsers.grammar(Parsing(finds_calls=True, binds=not form, **parsing), json.dumps(tools).encode(), form)
        assert self.matching.error_of(HEAD + lark) == "", lark
        return self.matching.matcher(HEAD + lark)

    def allows(self, text: str, tools: Sequence[Any] = TOOLS, **parsing: Any) -> bool:
        """Return whether it is a complete answer."""
        matcher = self.matcher(tools, **parsing)
        token_ids = tokens_of(text, self.vocabulary)
        return matcher.num_valid(token_ids) == len(token_ids) and matcher.consume(*token_ids) and matcher.is_accepting()

    def draw(self, seed: int, **parsing: Any) -> str:
        """Return an answer of random allowed tokens; brackets and quotes are likelier, so that it ends."""
        draw, matcher = random.Random(seed), self.matcher(TOOLS, **parsing)
        token_ids: list[int] = []
        while not matcher.is_stopped() and len(token_ids) < 2000:
            ends = [tokens_of(end, self.vocabulary) for end in VALUE_ENDS if draw.random() < 0.1]
            end = next((end for end in ends if matcher.num_valid(end) == len(end)), None)
            if end:
                assert matcher.consume(*end)
                token_ids += end
                continue
            mask = matcher.mask()
            allowed = [index for index in range(self.vocabulary.size) if mask[index // 8] >> index % 8 & 1]
            if self.end_id in allowed and draw.random() < 0.5:
                break
            closing = [index for index in allowed if index > 255 or chr(index) in '"}])<\n']
            plain = [index for index in allowed if 32 <= index < 127 and index != 92] or allowed
            token_id = draw.choice(closing if closing and draw.random() < 0.5 else plain)
            if token_id == self.end_id:
                break
            assert matcher.consume(token_id), matcher.error()
            token_ids.append(token_id)
        return b"".join(map(self.vocabulary.bytes_of, token_ids)).decode()


FORCED = {(name, has_tokens): Forced(name, has_tokens) for name in CALL_FAMILIES for has_tokens in (False, True)}


def id_of(key: tuple[str, bool]) -> str:
    return f"{key[0]}-{'tokens' if key[1] else 'text'}"


OFFERED = [key for key in sorted(FORCED) if key[0] != "json"]  # without what is used for forced calls only
if_offered = pytest.mark.parametrize("forced", OFFERED, ids=id_of, indirect=True)


@pytest.fixture(params=sorted(FORCED), ids=id_of)
def forced(request: pytest.FixtureRequest) -> tuple[str, Forced]:
    return request.param[0], FORCED[request.param]


def written(name: str, forced: Forced) -> str:
    """Return the answer of a family; without a token for arguments, Mistral's models write a list."""
    if name == "mistral" and forced.parsers.id_of("[ARGS]") is None:
        return '[TOOL_CALLS][{"name": "get_weather", "arguments": {"place": "Rome", "days": 3}}]'
    return ANSWERS[name]


def test_grammar_allows_what_the_parser_reads(forced: tuple[str, Forced]) -> None:
    name, family = forced
    answer = written(name, family)
    stream = stream_of(family.parsers, family.vocabulary, submit_of(TOOLS))
    assert calls(parse(stream, [tokens_of(answer, family.vocabulary)])) == MADE
    assert family.allows(answer, choice="required")
    assert family.allows(answer, choice="named", names=["get_weather"])
    assert not family.allows(answer, choice="named", names=["stop"])
    assert not family.allows("I would rather not.", choice="required")
    assert not family.allows("", choice="required")


def test_allowed_answers_are_calls_of_the_tools(forced: tuple[str, Forced]) -> None:
    _, family = forced
    for seed in range(3):
        text = family.draw(seed, choice="named", names=["get_weather"])
        stream = stream_of(family.parsers, family.vocabulary, submit_of(TOOLS))
        ((called, arguments),) = calls(parse(stream, [tokens_of(text, family.vocabulary)]))
        assert called == "get_weather"
        assert isinstance(arguments["place"], str), text
        assert arguments.keys() <= SCHEMA["properties"].keys()


@if_offered
def test_strict_tools_are_enforced_within_calls(forced: tuple[str, Forced]) -> None:
    name, family = forced
    answer = written(name, family)
    assert family.allows(SAID.get(name, "{}").format("It rains."), STRICT)
    assert family.allows(answer, STRICT)
    wrong = answer.replace("days", "dais")
    assert not family.allows(wrong, STRICT)
    if name in SAID:
        said = {
            "harmony": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant",
            "functionary_v32": "all\nWell.>>>",
        }[name]
        assert family.allows(f"{said}{answer}", STRICT)
        assert not family.allows(f"{said}{wrong}", STRICT)
        return
    if CALL_FAMILIES[name].triggers and not CALL_FAMILIES[name].openings:
        assert family.allows(f"Well, {answer}", STRICT)
        assert not family.allows(f"Well, {wrong}", STRICT)
    if CALL_FAMILIES[name].openings:
        assert family.allows(f" {answer}", STRICT)
        assert not family.allows(f"\n {wrong}", STRICT)
    if CALL_FAMILIES[name].openings and family.has_tokens:
        trigger = CALL_FAMILIES[name].triggers[0]
        end = CALL_FAMILIES[name].ends.get(trigger, "")
        assert family.allows(f"Well, {trigger}{answer}{end} so", STRICT)
        assert family.allows(f"{trigger} {answer}{end}", STRICT)
        assert not family.allows(f"Well, {trigger}{wrong}{end}", STRICT)


FORMS = {  # of a structured answer: its Lark, an answer, what is none
    "json": (lark_of(AnswerFormat("json", json.dumps({"type": "object", "properties": {"place": {"type": "string"}},
             "required": ["place"], "additionalProperties": False}), "x"), {}), '{"place": "Rome } {"}', '{"place": 5}'),
    "regex": (lark_of(AnswerFormat("regex", "[a-c]{2,3}\\}", "x"), {}), "abc}", "abc"),
    "choice": (lark_of(AnswerFormat("choice", '["yes", "no }"]', "x"), {}), "no }", "maybe"),
    "gbnf": (lark_of(AnswerFormat("grammar", 'root ::= "a" [0-9]+ "}"', "x"), {}), "a12}", "a"),
    "lark": (lark_of(AnswerFormat("grammar", 'start: call0 call\ncall0: "{"\ncall: /[a-z]+/', "x"), {}), "{abc", "abc"),
}  # fmt: skip


@if_offered
@pytest.mark.parametrize("form", FORMS)
def test_answer_is_calls_or_follows_the_format(forced: tuple[str, Forced], form: str) -> None:
    name, family = forced
    lark = FORMS[form][0]
    answer = written(name, family)
    for tools in (TOOLS, STRICT):
        right, wrong = (SAID.get(name, "{}").replace("{}", text) for text in FORMS[form][1:])
        assert family.allows(right, tools, form=lark)
        assert not family.allows(wrong, tools, form=lark)
        assert family.allows(answer, tools, form=lark)
        assert not family.allows(answer[:-1], tools, form=lark)
        assert not family.allows("It rains.", tools, form=lark)
        assert not family.allows(answer + right, tools, form=lark)
        assert not family.allows(answer.replace("days", "dais"), tools, form=lark)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_harmony_puts_a_format_into_its_last_message(has_tokens: bool) -> None:
    family = FORCED["harmony", has_tokens]
    lark, right, wrong = FORMS["json"]
    thought = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
    last = "<|channel|>final<|message|>"

    def allows(text: str, budget: int = -1) -> bool:
        grammar = family.parsers.framed(lark, Parsing(finds_reasoning=True, thinking_token_budget=budget))
        assert family.matching.error_of(HEAD + grammar) == "", grammar
        matcher = family.matching.matcher(HEAD + grammar)
        token_ids = tokens_of(text, family.vocabulary)
        return matcher.num_valid(token_ids) == len(token_ids) and matcher.consume(*token_ids) and matcher.is_accepting()

    assert allows(f"{last}{right}")
    assert allows(f"{thought}{last}{right}")
    assert allows(f"{thought}{last}{right}", budget=20)
    assert not allows(f"{thought}{last}{right}", budget=0)
    for text in (f"{last}{wrong}", f"{thought}{last}{wrong}", right, f"{last}{right} so"):
        assert not allows(text)
    if has_tokens:
        assert not allows(f"{thought}{last}{right}", budget=3)


def test_call_inside_structured_output_is_text(forced: tuple[str, Forced]) -> None:
    name, family = forced
    call = ANSWERS["hermes" if name in ("llama3_json", "pythonic") else name]
    text = json.dumps({"place": call}, ensure_ascii=False)
    submit = submit_of(TOOLS, has_format=True)
    parts = parse(stream_of(family.parsers, family.vocabulary, submit), [list(text.encode())])
    assert (calls(parts), content(parts)) == ([], text)
    parts = parse(stream_of(family.parsers, family.vocabulary, submit), [tokens_of(written(name, family), family.vocabulary)])
    assert (calls(parts), content(parts)) == (MADE, "")
