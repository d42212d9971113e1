"""Every part of a conversation reaches the prompt with each chat template: a marker in each part is found in the text."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

import pytest

from engine.errors import RequestError
from engine.messages import ChatPrompt
from engine.tokenizer.chat.rewrites import with_short_call_ids, with_single_calls
from engine.tokenizer.chat.template import ChatTemplate, ChatTemplates
from tests.engine.chat_templates import OWN_TEMPLATES
from tests.engine.chat_templates import TEMPLATES as PUBLISHED_AND_OWN

NOW = datetime(2026, 1, 1)
STRICT = """{%- for message in messages -%}
{%- set expected = ('user', 'assistant')[loop.index0 % 2] -%}
{%- if message.role != expected -%}{{ raise_exception('user and assistant must alternate') }}{%- endif -%}
{{- '<' + message.role + '>' + message.content -}}
{%- endfor -%}"""  # knows neither system messages nor tools
TEMPLATES = PUBLISHED_AND_OWN | {"strict": STRICT}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"N{number}mark",
            "description": "d",
            "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "d"}}},
        },
    }
    for number in (1, 2, 3)
]
Message = dict[str, Any]


def user(number: int) -> Message:
    return {"role": "user", "content": f"U{number}mark"}


def user_parts(number: int) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": f"{letter}{number}mark"} for letter in "UV"]}


def system(number: int) -> Message:
    return {"role": "system", "content": f"Y{number}mark"}


def developer(number: int) -> Message:
    return {"role": "developer", "content": f"D{number}mark"}


def assistant(text: str, *calls: Message) -> Message:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(number: int, arguments: str = "") -> Message:
    text = arguments or json.dumps({"key": f"A{number}mark"})
    return {"type": "function", "id": call_id(number), "function": {"name": f"N{number}mark", "arguments": text}}


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": call_id(number), "content": f"R{number}mark"}


def call_id(number: int) -> str:
    return f"call_0123456789abcdefABCDEF0{number}"


CONVERSATIONS = {
    "system": [system(1), user(1)],
    "developer": [developer(1), user(1)],
    "system, developer": [system(1), developer(1), user(1)],
    "two systems": [system(1), system(2), user(1)],
    "system in between": [system(1), user(1), assistant("S1mark"), system(2), user(2)],
    "first system in between": [user(1), assistant("S1mark"), system(1), user(2)],
    "developer in between": [system(1), user(1), assistant("S1mark"), developer(1), user(2)],
    "system last": [system(1), user(1), assistant("S1mark"), user(2), system(2)],
    "two users": [user(1), user_parts(2)],
    "two assistants": [user(1), assistant("S1mark"), assistant("S2mark"), user(2)],
    "assistant first": [system(1), assistant("S1mark"), user(1)],
    "call": [user(1), assistant("", call(1)), result(1), assistant("S1mark"), user(2)],
    "result last": [system(1), user(1), assistant("", call(1)), result(1)],
    "text beside call": [user(1), assistant("S1mark", call(1)), result(1), assistant("S2mark"), user(2)],
    "text beside call, result last": [system(1), user(1), assistant("S1mark", call(1)), result(1)],
    "two calls": [user(1), assistant("", call(1), call(2)), result(1), result(2), assistant("S1mark"), user(2)],
    "results in other order": [system(1), user(1), assistant("", call(1), call(2)), result(2), result(1)],
    "rounds of calls": [
        system(1), user(1), assistant("S1mark", call(1), call(2)), result(1), result(2), assistant("S2mark", call(3)), result(3)
    ],
    "user after result": [system(1), user(1), assistant("S1mark", call(1)), result(1), user(2), assistant("S2mark"), user(3)],
    "call without result": [user(1), assistant("", call(1)), user(2)],
    "arguments cut off": [user(1), assistant("", call(1, '{"key": "A1mark')), result(1), assistant("S1mark"), user(2)],
    "arguments in a list": [user(1), assistant("", call(1, '["A1mark"]')), result(1), assistant("S1mark"), user(2)],
    "all together": [
        system(1), user(1), assistant("S1mark", call(1), call(2)), result(2), result(1),
        system(2), user_parts(2), assistant("S2mark"), developer(1), user(3)
    ],
}  # fmt: skip


@lru_cache
def templates_of(name: str) -> ChatTemplates:
    return ChatTemplates(
        {"default": TEMPLATES[name]}, {"bos_token": "<s>", "eos_token": "</s>"}, 1 << 20, trusts_requests=False
    )


def render(name: str, messages: list[Message], has_tools: bool = True) -> str:
    tools = json.dumps(TOOLS).encode() if has_tools else b""
    return templates_of(name).render(ChatPrompt(json.dumps(messages).encode(), tools=tools), NOW)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_part_of_a_conversation_is_shown(name: str) -> None:
    lost = {}
    for title, messages in CONVERSATIONS.items():
        has_tools = "tool_calls" in str(messages) or "tool_use" in name
        declared = render(name, [{"role": "user", "content": "hi"}], has_tools)
        text = render(name, messages, has_tools)
        marks = set(re.findall(r"[A-Z]\dmark", json.dumps(messages)))
        lost[title] = sorted(mark for mark in marks if text.count(mark) <= declared.count(mark))
    assert {title: marks for title, marks in lost.items() if marks} == {}


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_keep_their_order(name: str) -> None:
    messages = [user(1), assistant("S1mark"), user(2), assistant("S2mark", call(1)), result(1), assistant("S3mark"), user(3)]
    text = render(name, messages)
    marks = ["U1mark", "S1mark", "U2mark", "A1mark", "R1mark", "S3mark", "U3mark"]
    assert sorted(marks, key=text.index) == marks


def test_common_conversations_are_rendered_as_they_are() -> None:
    messages = [system(1), user(1), assistant("S1mark"), user(2)]
    variables = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    for name, source in OWN_TEMPLATES.items():
        assert render(name, messages, False) == ChatTemplate(source)._template.render(variables, 1 << 20)


def test_foreign_call_ids_become_short_ones_that_match() -> None:
    text = render("mistral", [user(1), assistant("", call(1), call(2)), result(1), result(2)])
    ids = re.findall(r'"id": "(\w+)"', text)
    assert [len(each) for each in dict.fromkeys(ids)] == [9, 9]
    assert re.findall(r'"call_id": "(\w+)"', text) == ids
    kept = with_short_call_ids([{"role": "tool", "tool_call_id": "abcDEF123", "content": ""}])
    assert kept[0]["tool_call_id"] == "abcDEF123"


def test_calls_are_followed_by_their_results() -> None:
    split = with_single_calls([assistant("", call(1), call(2)), result(2), result(1), {"role": "tool", "content": "more"}])
    assert [message.get("tool_call_id") or message.get("tool_calls", [{}])[0].get("id") for message in split] == [
        call_id(1), call_id(1), call_id(2), call_id(2), None
    ]  # fmt: skip
    unnamed = [{"role": "tool", "content": "first"}, {"role": "tool", "content": "second"}]
    contents = [message["content"] for message in with_single_calls([assistant("", call(1), call(2)), *unnamed])]
    assert contents == ["", "first", "", "second"]


def test_arguments_that_are_no_object_stay_as_written() -> None:
    assert '"arguments": {"key": "A1mark}' in render("hermes", [user(1), assistant("", call(1, '{"key": "A1mark')), user(2)])
    assert '"A1mark' in render("qwen3_coder", [user(1), assistant("", call(1, '{"key": "A1mark')), user(2)])


TEXT_ARGUMENTS = """{%- for m in messages -%}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] -%}[{{ call.function.name + call.function.arguments }}]{%- endfor -%}{%- endfor -%}"""
EITHER_ARGUMENTS = TEXT_ARGUMENTS.replace(
    "call.function.arguments }}",
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}",
)


@pytest.mark.parametrize("source", [TEXT_ARGUMENTS, EITHER_ARGUMENTS])
@pytest.mark.parametrize("arguments", ['{"a":1,"b": "\u00e9"}', '{ "b" : [1.50, 1e3] }', "{}"])
def test_calls_keep_the_clients_own_text(source: str, arguments: str) -> None:
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    for messages in ([user(1), assistant("", call(1, arguments)), result(1)], [assistant("", call(1, arguments)), user(1)]):
        assert f"[N1mark{arguments}]" in templates.render(ChatPrompt(json.dumps(messages).encode()), NOW)


def test_text_that_a_template_wraps_is_an_object() -> None:
    wrapping = EITHER_ARGUMENTS.replace("call.function.arguments if", "'{' + call.function.arguments + '}' if")
    templates = ChatTemplates({"default": wrapping}, {}, 1 << 20, trusts_requests=False)
    text = templates.render(ChatPrompt(json.dumps([user(1), assistant("", call(1, '{"a":1}')), result(1)]).encode()), NOW)
    assert '[N1mark{"a": 1}]' in text


def test_parts_are_probed_with_the_usual_variables() -> None:
    """A template that adds `bos_token` and a date to a text shows no content without them."""
    source = """{{ bos_token + strftime_now('%Y') }}{%- for m in messages -%}<{{ m.role }}>
{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for part in m.content -%}({{ part.text }}){%- endfor -%}
{%- endif -%}{%- endfor -%}{%- if tools is not none -%}{{ tools | length }}{%- endif -%}"""
    templates = ChatTemplates({"default": source}, {"bos_token": "<s>"}, 1 << 20, trusts_requests=False)
    assert templates.render(ChatPrompt(json.dumps([user_parts(1)]).encode()), NOW) == "<s>2026<user>(U1mark)(V1mark)"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_every_name_that_templates_use(name: str) -> None:
    source = "{% for m in messages %}{{ m.reasoning }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    message = assistant("S1mark") | {name: "why "}
    assert templates.render(ChatPrompt(json.dumps([user(1), message, user(2)]).encode()), NOW) == "why why why "


REQUIRING = """{%- for tool in tools -%}{{ tool.function.name + tool.function.description }}
{%- for key, schema in tool.function.parameters.properties.items() -%}{{ key + schema.description }}{%- endfor -%}{%- endfor -%}
{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- for c in m.tool_calls or [] -%}
[{{ c.id + c.function.name }}{{ c.function.arguments | tojson }}]
{%- endfor -%}{%- if m.role == 'tool' -%}{{ '@' + m.tool_call_id }}{%- endif -%}{%- endfor -%}"""


def test_templates_that_require_optional_fields_get_them() -> None:
    """OpenAI's API requires neither a description nor parameters of a function, and clients leave out more."""
    templates = ChatTemplates({"default": REQUIRING}, {}, 1 << 20, trusts_requests=False)
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": {"properties": {"k": {}}}}},
    ]
    unnamed = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [user(1), assistant("", unnamed), {"role": "tool", "content": "R1mark"}]
    for sent, declared in ((tools, "fgk"), ([], "")):
        prompt = ChatPrompt(json.dumps(messages).encode(), tools=json.dumps(sent).encode() if sent else b"")
        assert templates.render(prompt, NOW) == f"{declared}<user>U1mark<assistant>[call_0f{{}}]<tool>R1mark@call_0"
    broken = ChatTemplates({"default": "{{ messages[0].none.other }}"}, {}, 1 << 20, trusts_requests=False)
    with pytest.raises(RequestError, match="no attribute"):
        broken.render(ChatPrompt(json.dumps(messages[:1]).encode()), NOW)


def test_tools_reach_templates_that_read_messages() -> None:
    source = """{%- for message in messages -%}<{{ message.role }}>{{ message.content }}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none -%}
{{ '[' + message['tools'] + ']' }}{%- endif -%}{%- endfor -%}"""
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    tools = [{"type": "function", "function": {"name": "f", "description": "ü"}}]
    for messages, begin in (([user(1)], "<system>"), ([system(1), user(1)], "<system>Y1mark")):
        prompt = ChatPrompt(json.dumps(messages).encode(), tools=json.dumps(tools).encode())
        assert templates.render(prompt, NOW) == f'{begin}[[{{"name": "f", "description": "ü"}}]]<user>U1mark'
    assert templates.render(ChatPrompt(json.dumps([user(1)]).encode()), NOW) == "<user>U1mark"


def test_templates_may_append_to_lists() -> None:
    source = "{% set made = [] %}{% for m in messages %}{% set _ = made.append(m.content) %}{% endfor %}{{ made | join(',') }}"
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    assert templates.render(ChatPrompt(json.dumps([user(1), user(2)]).encode()), NOW) == "U1mark,U2mark"
    clearing = ChatTemplates({"default": "{{ messages.clear() }}"}, {}, 1 << 20, trusts_requests=False)
    with pytest.raises(RequestError, match="unsafe"):
        clearing.render(ChatPrompt(json.dumps([user(1)]).encode()), NOW)


def test_empty_content_of_calls_suits_the_template() -> None:
    source = "{%- for m in messages -%}<{{ m.role }}>{%- if m.content is not none -%}{{ m.content }}.{%- endif -%}"
    source += "{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}{%- endfor -%}{%- endfor -%}"
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    for content, shown in ((None, ""), ("", "."), ("S1mark", "S1mark.")):
        message = assistant("", call(1)) | {"content": content}
        assert f"<assistant>{shown}{{" in templates.render(ChatPrompt(json.dumps([user(1), message, result(1)]).encode()), NOW)
    printing = ChatTemplates({"default": source.replace("m.content is not none", "true")}, {}, 1 << 20, trusts_requests=False)
    for content in (None, ""):
        messages = [user(1), assistant("", call(1)) | {"content": content}, result(1)]
        assert "<assistant>.{" in printing.render(ChatPrompt(json.dumps(messages).encode()), NOW)


def test_what_a_template_shows_completely_stays_unchanged() -> None:
    """A template that shows the text beside a call only until the next answer must not get it as a message of its own."""
    source = """{%- for m in messages -%}<{{ m.role }}>{%- if m.tool_calls and loop.last or not m.tool_calls
-%}{{ m.content }}{%- endif -%}{%- for c in m.tool_calls or [] -%}{{ c.function.arguments | tojson }}
{%- endfor -%}{%- endfor -%}"""
    templates = ChatTemplates({"default": source}, {}, 1 << 20, trusts_requests=False)
    last = templates.render(ChatPrompt(json.dumps([user(1), assistant("S1mark", call(1))]).encode()), NOW)
    assert last == '<user>U1mark<assistant>S1mark{"key": "A1mark"}'
    earlier = templates.render(ChatPrompt(json.dumps([user(1), assistant("S1mark", call(1)), result(1)]).encode()), NOW)
    assert "<assistant>S1mark<assistant>{" in earlier


def test_a_template_that_refuses_everything_says_why() -> None:
    refusing = ChatTemplates({"default": "{{ raise_exception('not today') }}"}, {}, 1 << 20, trusts_requests=False)
    for messages in CONVERSATIONS.values():
        with pytest.raises(RequestError, match="not today"):
            refusing.render(ChatPrompt(json.dumps(messages).encode()), NOW)
