"""Chat templates: the behaviour of transformers, messages that clients send, and hostile templates."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from datetime import datetime
from typing import Any

import pytest
from jinja2.utils import Namespace

from engine.errors import CheckpointError, RequestError
from engine.messages import ChatPrompt
from engine.tokenizer.chat.sandbox import Template
from engine.tokenizer.chat.template import ChatTemplate, ChatTemplates

NOW = datetime(2026, 3, 4, 5, 6, 7)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "Hi"}


def prompt(*messages: dict[str, Any], tools: Any = None, variables: Any = None, **options: Any) -> ChatPrompt:
    return ChatPrompt(
        json.dumps(messages).encode(),
        tools=json.dumps(tools).encode() if tools is not None else b"",
        chat_template_kwargs=json.dumps(variables).encode() if variables is not None else b"",
        **options,
    )


def render(template: str | dict[str, str], chat: ChatPrompt, special_tokens: dict[str, str] | None = None) -> str:
    sources = {"default": template} if isinstance(template, str) else template
    return ChatTemplates(sources, special_tokens or {}, max_characters=10_000, trusts_requests=True).render(chat, NOW)


def refusal(template: str | dict[str, str], chat: ChatPrompt) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(template, chat)
    assert caught.value.status == 400
    return caught.value


# --------------------------------------------------------------------------------------------------- as in transformers


def test_a_conversation_with_and_without_generation_prompt() -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, prompt(USER)) == text + "<|im_start|>assistant\n"
    assert render(CHATML, prompt(USER, add_generation_prompt=False)) == text


def test_whitespace_around_blocks_is_trimmed() -> None:
    assert render("{% if true %}\n    {% set x = 1 %}\na{{ x }}\n{% endif %}\n", prompt(USER)) == "a1\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1} | tojson(indent=1) }}", '{\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% set x = 1 %}{% endgeneration %}c{{ x }}", "abc"),
        ("{{ documents is none }} {{ tools is none }}", "True True"),
        ("{{ messages[0].content.strip().split('i')[0] }}{{ undefined_name }}", "H"),
    ],
)
def test_features_of_templates(template: str, expected: str) -> None:
    assert render(template, prompt(USER), {"bos_token": "<s>", "eos_token": "</s>"}) == expected


def test_tools_choose_the_tool_template() -> None:
    templates = {"default": "plain {{ tools is none }}", "tool_use": "{{ tools[0].function.name }}", "rag": "rag"}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert render(templates, prompt(USER)) == "plain True"
    assert render(templates, prompt(USER, tools=[])) == "plain True"
    assert render(templates, prompt(USER, tools=tools)) == "weather"
    assert render(templates, prompt(USER, tools=tools, chat_template="rag")) == "rag"
    assert render({"default": "{{ tools | length }}"}, prompt(USER, tools=tools)) == "1"


def test_a_request_brings_its_template_and_variables() -> None:
    chat = prompt(
        USER, chat_template="{{ mood }} {{ documents[0].text }}", variables={"mood": "glad", "documents": [{"text": "d"}]}
    )
    assert render(CHATML, chat) == render({}, chat) == "glad d"


@pytest.mark.parametrize("content", ["The answer", "", "trailing  ", "two\nlines", [{"type": "text", "text": "The answer"}]])
def test_the_final_message_is_continued(content: Any) -> None:
    chat = prompt(USER, {"role": "assistant", "content": content}, add_generation_prompt=False, continue_final_message=True)
    text = content if isinstance(content, str) else content[0]["text"]
    assert render(CHATML, chat) == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}"
    stripping = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(stripping, chat).rstrip() == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}".rstrip()


def test_invalid_continuations_are_refused() -> None:
    assistant = {"role": "assistant", "content": "x"}
    assert "exclude" in refusal(CHATML, prompt(assistant, continue_final_message=True)).message
    chat = prompt(assistant, continue_final_message=True, add_generation_prompt=False)
    assert "does not show" in refusal("nothing", chat).message


# ------------------------------------------------------------------------------------------------------ what clients send


def test_contents_match_the_template() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]}
    assert "user\na\nb\nc<" in render(CHATML, prompt(parts))
    assert render(PARTS_ONLY, prompt(parts, USER)) == "[text:a][text:b][text:c][text:Hi]"
    both = "{% for m in messages %}{{ 'S' + m.content if m.content is string else 'P' + m.content[0].text }}{% endfor %}"
    assert render(both, prompt(USER, parts)) == "SHiPa"


def test_a_template_that_likes_no_probe_gets_strings() -> None:
    picky = "{% if messages | length < 2 %}{{ raise_exception('two please') }}{% endif %}{{ messages[1].content }}"
    assert render(picky, prompt(USER, {"role": "user", "content": [{"type": "text", "text": "x"}]})) == "x"


def test_tool_calls_and_missing_contents() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    template = (
        "{% for m in messages %}<{{ m.content + '' }}{% if 'tool_calls' in m %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}>{% endfor %}"
    )
    messages = ({"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "tool_calls": []})
    assert render(template, prompt(*messages)) == '<{"x": [1]}><>'


def test_older_function_calls_reach_the_prompt() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}>{% endfor %}"
    )
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    result = {"role": "function", "name": "f", "content": "R"}
    assert render(template, prompt(called, result)) == '<assistant:f{"x": 1}><tool:R>'


def test_refusal_of_history_reaches_the_prompt() -> None:
    template = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
    assert (
        render(template, prompt({"role": "assistant", "content": None, "refusal": "No."}, USER)) == "<assistant:No.><user:Hi>"
    )
    assert render(template, prompt({"role": "assistant", "content": "a", "refusal": None})) == "<assistant:a>"


def test_role_that_template_drops_is_refused() -> None:
    template = "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.content }}>{% endfor %}"
    error = refusal(template, prompt(USER, {"role": "critic", "content": "bad"}))
    assert "'critic'" in error.message
    assert "system" in error.message
    assert error.param == "messages[1].role"
    shown = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
    assert render(shown, prompt(USER, {"role": "critic", "content": "bad"})) == "<user:Hi><critic:bad>"


@pytest.mark.parametrize(
    ("messages", "fragment"),
    [
        ([], "empty"),
        ({}, "messages"),
        ([1], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "function"),
    ],
)
def test_wrong_messages_are_named(messages: Any, fragment: str) -> None:
    error = refusal(CHATML, ChatPrompt(json.dumps(messages).encode()))
    assert fragment in error.message
    assert error.param == "messages"


def test_other_mistakes_are_named() -> None:
    message = refusal({}, prompt(USER)).message  # also of an engine that has no /v1/completions
    assert message == "this model has no default chat template; start with --chat-template, or send a text instead of messages"
    assert refusal(CHATML, prompt(USER, tools={"a": 1})).param == "tools"
    assert refusal(CHATML, prompt(USER, variables=[1])).param == "chat_template_kwargs"
    assert "messages" in refusal(CHATML, prompt(USER, variables={"messages": []})).message
    refusing = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refusal(refusing, prompt(USER, USER)).message
    assert refusal(CHATML, ChatPrompt(b"[" * 100_000)).param == "messages"


def test_invalid_model_template_ends_the_start() -> None:
    with pytest.raises(CheckpointError, match="'tool_use'"):
        ChatTemplates({"default": CHATML, "tool_use": "{% if %}"}, {}, 100, trusts_requests=False)


# ------------------------------------------------------------------------------------------------ templates that mean harm

BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}aaaaaaaaaaaaaaaa{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "format": "{{ '%1000000000d' % 1 }}",
    "width": "{{ '{:1000000000}'.format(1) }}",
    "indent": "{{ [1] | tojson(indent=1000000000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 20_000,
    "length": "x" * 1_000_000,
    "range": "{{ range(1000000000) | list }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "write": "{{ messages.clear() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "syntax": "{% for %}",
    "message": "{{ raise_exception([[['aaaaaaaaaa'] * 1000] * 1000] * 1000) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_harmful_templates_fail_their_request_alone(name: str) -> None:
    """Time and memory are bounded (the test's watchdog and the limit of the process), and all limits are restored
    afterwards."""
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF), gc.isenabled()
    templates = ChatTemplates({"default": CHATML}, {}, max_characters=100_000, trusts_requests=True)
    with pytest.raises(RequestError) as caught:
        templates.render(prompt(USER, chat_template=BOMBS[name]), NOW)
    assert (caught.value.status, caught.value.param) == (400, "chat_template")
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF), gc.isenabled()) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert templates.render(prompt(USER), NOW).startswith("<|im_start|>user")


def test_own_template_that_needs_too_much_memory_is_named() -> None:
    with pytest.raises(CheckpointError, match="template 'default' does not compile: it needs too much memory"):
        ChatTemplates({"default": "{{ 'a' * 10**12 }}"}, {}, max_characters=100, trusts_requests=True)


@pytest.mark.slow
def test_no_garbage_is_collected_on_a_templates_time() -> None:
    """An error that the timer raised in a callback of the collector was lost, and a collection of the whole process counted."""
    templates = ChatTemplates({"default": CHATML}, {}, max_characters=100_000, trusts_requests=True)
    makes_many = "{% set n = namespace(l=[]) %}{% for i in range(20000) %}{% set n.l = [n.l] %}{% endfor %}done"
    templates.render(prompt(USER, chat_template=makes_many), NOW)  # compiled
    gc.collect()  # so that objects made before do not count
    phases: list[str] = []
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    try:
        assert templates.render(prompt(USER, chat_template=makes_many), NOW) == "done"
        during = list(phases)
        gc.collect()
        assert not during
        assert phases  # the callback would have told
    finally:
        gc.callbacks.pop()


@pytest.mark.slow
def test_a_template_leaves_little_garbage() -> None:
    """Successive requests filled a helper with garbage until it ended: the collector counts objects, not bytes."""
    many = 40_000_000  # memory of its own, not what others left free
    template = Template(
        f"{{% for i in (1, 2) %}}{{% set n = namespace(a='x' * {many} ~ i) %}}{{% set n.self = n %}}{{% endfor %}}done"
    )
    gc.collect()
    for _ in range(2):
        assert template.render({}, 100) == "done"
        assert sum(isinstance(each, Namespace) for each in gc.get_objects()) <= 1


def test_garbage_is_collected_after_a_failed_template() -> None:
    template, (soft, hard) = Template("x"), resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        least = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            template.render({}, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gc.isenabled()


def test_templates_of_requests_are_an_option() -> None:
    templates = ChatTemplates({"default": CHATML, "rag": "rag"}, {}, max_characters=1000, trusts_requests=False)
    with pytest.raises(RequestError, match="--trust-request-chat-template") as caught:
        templates.render(prompt(USER, chat_template="{{ messages }}"), NOW)
    assert (caught.value.status, caught.value.param) == (400, "chat_template")
    assert templates.render(prompt(USER, chat_template="rag"), NOW) == "rag"


def test_exceptions_of_templates_become_messages() -> None:
    complaint = r"{{ raise_exception('\ud800' ~ messages[0].content) }}"
    for sources, chat in ((complaint, prompt(USER)), (CHATML, prompt(USER, chat_template=complaint))):
        assert refusal(sources, chat).message == r"the chat template failed: \ud800Hi"
    long = refusal(CHATML, prompt(USER, chat_template="{{ raise_exception('x' * 1000000) }}")).message
    assert len(long) < 2000


def test_a_template_keeps_no_state() -> None:
    template = ChatTemplate("{% set n = namespace(x=0) %}{% set n.x = n.x + 1 %}{{ n.x }}")
    assert [template.render([USER], {}, 100) for _ in range(2)] == ["1", "1"]
