"""The questions with tools that train and test the demonstration model, and the template that shows them."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pytest

from engine.parsers.choice import choose_call_parser, choose_reasoning_parser
from engine.tokenizer.chat.template import ChatTemplate
from tests.e2e.engine_process import DEMO
from tests.engine.tokenizer.vocabularies import vocabulary_of
from tools.demo import calls, data
from tools.demo.conversations import Conversation, held_out_calls, training_choices, training_conversations
from tools.demo.evaluate import Manner, body_of
from tools.demo.template import CHAT_TEMPLATE, prompt_of, rendered

Choice = tuple[tuple[calls.Json, ...], list[tuple[str, str]]]
WORD = re.compile("[a-z]{2,}")


@pytest.fixture(scope="module")
def trained() -> list[Conversation]:
    return list(islice((one for one in training_conversations(seed=7) if one.tools), 1500))


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return list(islice(training_choices(seed=7), 500))


@pytest.fixture(scope="module")
def asked() -> list[data.Question]:
    return held_out_calls(400, seed=7)


def words_of(tools: tuple[calls.Json, ...]) -> set[str]:
    """Return the words in the names of tools and of their arguments."""
    names = [name for tool in tools for name in (tool["function"]["name"], *tool["function"]["parameters"]["properties"])]
    return {word for name in names for word in WORD.findall(re.sub("([A-Z])", r" \1", name).lower())}


def test_examined_tools_and_values_are_not_trained(
    trained: list[Conversation], choices: list[Choice], asked: list[data.Question]
) -> None:
    shown = [*(conversation.tools for conversation in trained), *(tools for tools, _ in choices)]
    seen = {word for tools in shown for word in words_of(tools)}
    shared = {*calls.ASKING_VERBS, *calls.ACTING_VERBS, *calls.SUFFIXES}
    for question in asked:
        assert words_of(question.definitions()) & seen <= shared
    texts = {
        value
        for question in asked
        if question.call
        for argument, value in question.call.arguments.items()
        if isinstance(value, str) and value.isalpha() and value not in str(question.definitions())
    }
    assert len(texts) > 30
    called = [conversation.answer for conversation in trained if '"arguments"' in conversation.answer]  # not words in JSON
    given = {value for answer in called for value in re.findall(r'": "(\w+)"', answer)}
    assert not texts & given
    assert len(given) > 30


def test_each_tool_is_chosen_by_a_question(choices: list[Choice]) -> None:
    for tools, questions in choices:
        assert len(tools) > 1
        assert {name for _, name in questions} == {tool["function"]["name"] for tool in tools}


def test_calls_match_their_tools(asked: list[data.Question]) -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool}
    calling = [question for question in asked if question.call]
    assert len(calling) >= 0.5 * len(asked)
    assert sum(len(question.tools) > 1 for question in calling) > len(calling) // 3
    for question in calling:
        call = question.call
        assert call is not None
        (tool,) = (tool for tool in question.tools if tool.name == call.name)
        schemas = tool.definition()["function"]["parameters"]
        assert set(schemas["required"]) <= set(call.arguments) <= set(schemas["properties"])
        for name, value in call.arguments.items():
            schema = schemas["properties"][name]
            assert type(value) is types[schema["type"]]
            assert value in schema.get("enum", [value])
            assert isinstance(value, bool) or str(value) in question.text


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "f", "arguments": {"b": "x", "a": 1}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "1", "b": "x"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "g", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', False),
        ('{"name": "f", "arguments": {"a": 1, "b": "x"}}', False),
        ('Yes. <tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', False),
        ("", False),
    ],
)
def test_only_the_call_itself_is_right(reply: str, is_right: bool) -> None:
    call = calls.Call("f", {"a": 1, "b": "x"})
    question = data.Question("call", "", "", call.text(), call=call)
    assert data.is_correct(question, reply) is is_right


def test_engine_renders_the_training_template(trained: list[Conversation]) -> None:
    template = ChatTemplate((DEMO / "chat_template.jinja").read_text())
    assert template.source == CHAT_TEMPLATE
    for conversation in trained[:200]:
        variables = {"tools": list(conversation.tools), "add_generation_prompt": True}
        for thinks in (False, True):
            shown = template.render(conversation.messages[:-1], variables | {"enable_thinking": thinks}, 1 << 20)
            assert shown == prompt_of(conversation.messages[:-1], conversation.tools, thinks)
            assert shown.endswith("<think>\n") == thinks
        whole = template.render(conversation.messages, {"tools": list(conversation.tools)}, 1 << 20)
        assert whole == rendered(Conversation(conversation.messages, conversation.tools, None, conversation.answer))


def test_parsers_are_found_and_their_markers_are_tokens() -> None:
    vocabulary = vocabulary_of(DEMO)
    templates = {"default": (DEMO / "chat_template.jinja").read_text()}
    assert choose_call_parser(templates, lambda marker: True) == "hermes"
    assert choose_reasoning_parser(templates, lambda marker: True) == "qwen3"
    for marker in ("<tool_call>", "</tool_call>", "<think>", "</think>"):
        (token_id,) = vocabulary.encode(marker, False)
        assert token_id not in vocabulary.special_ids  # without a parser they are shown


ODD_PARAMETERS = (
    *(None, 5, "x", [], {}, {"properties": 5}, {"properties": {"a": 5, "b": None}, "required": 5}),
    {"properties": {"c": {"enum": 5}, "d": {"enum": [1, None]}, "e": {"type": ["string", "null"]}, "items": {"type": 7}}},
)


@pytest.mark.parametrize("parameters", ODD_PARAMETERS, ids=str)
def test_odd_schemas_are_shown(parameters: Any) -> None:
    function = {"name": "f", "parameters": parameters, "description": 5}
    shown = prompt_of([{"role": "user", "content": "hi"}], ({"function": function},))
    assert "Tools:\nf(" in shown
    assert (
        ChatTemplate(CHAT_TEMPLATE).render(
            [{"role": "user", "content": "hi"}], {"tools": [{"function": function}], "add_generation_prompt": True}, 1 << 20
        )
        == shown
    )


def test_examination_uses_openais_format() -> None:
    (question,) = (question for question in held_out_calls(4) if question.before)
    body = body_of(question, "demo", Manner(thinks=True))
    _, calling, result = body["messages"]
    (call,) = calling["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
