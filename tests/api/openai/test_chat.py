"""`/v1/chat/completions`, `/v1/models` and the tokenizer's routes, with the real client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.messages import ChatPrompt, Tokenize
from tests.api.api_server import MODEL, ApiServer
from tests.api.tokenizer_peer import said_text

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def chat_prompt(server: ApiServer, body: dict[str, Any]) -> ChatPrompt:
    """Return the prompt that the tokenizer gets for a body."""
    answer = server.post("/v1/chat/completions", {"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    prompt = server.peer.submits()[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, max_tokens=1)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == said_text(20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_logprobs_and_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, max_tokens=12, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for index, choice in enumerate(answer.choices):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        text = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert text.decode("utf-8", "replace") == choice.message.content == said_text(12, index)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    first = answer.choices[0].logprobs
    assert first is not None
    assert first.content is not None
    assert [(top.token, top.logprob) for top in first.content[0].top_logprobs] == [("Q", -0.9), ("P", -1.0)]
    assert (first.content[9].token, first.content[9].bytes) == ("bytes:\\xc3", [0xC3])


def test_prompt_logprobs_and_token_ids(server: ApiServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True, "n": 2, "best_of": 3}
    answer = server.post("/v1/chat/completions", body).json()
    prompt = list(b'["hi"]')
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt, prompt]
    assert answer["choices"][0]["token_ids"] == list(said_text(2, 2).encode())
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {"34": {"logprob": -0.5, "rank": 2, "decoded_token": '"'}}


def test_conversation_reaches_the_tokenizer_unchanged(server: ApiServer) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be"}, "brief"]},
        {"role": "user", "content": "hi", "name": "me", "mood": "good"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {
        "messages": messages,
        "tools": tools,
        "tool_choice": "auto",
        "chat_template": "T",
        "chat_template_kwargs": {"a": [1]},
    }
    prompt = chat_prompt(server, body | {"response_format": {"type": "text"}})
    assert orjson.loads(prompt.messages) == messages
    assert orjson.loads(prompt.tools) == tools
    assert orjson.loads(prompt.chat_template_kwargs) == {"a": [1]}
    assert prompt.chat_template == "T"
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)
    assert chat_prompt(server, {**body, "tool_choice": "none"}).tools == b""


def test_default_template_variables_apply(tmp_path: Path) -> None:
    """--default-chat-template-kwargs apply in every chat API; a request's own values win."""
    default = {"enable_thinking": False, "style": {"short": True}, "reasoning_effort": "high"}
    with ApiServer(tmp_path, default_chat_template_kwargs=default) as server:
        for path, body, expected in (
            ("/v1/chat/completions", {"messages": MESSAGES}, default),
            ("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
            ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"style": 1}}, default | {"style": 1}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, default),
            ("/v1/responses", {"input": "hi", "store": False}, default),
            ("/api/chat", {"messages": MESSAGES, "stream": False}, default),
        ):
            assert server.post(path, {"model": "tiny", **body}).status_code == 200
            prompt = server.peer.submits()[-1].prompt
            assert isinstance(prompt, ChatPrompt)
            found = orjson.loads(prompt.chat_template_kwargs)
            assert found.items() >= expected.items(), (path, found)
            assert found["style"] == expected.get("style", default["style"])
        assert server.post("/tokenize", {"messages": MESSAGES}).status_code == 200
        (call,) = [message for message in server.peer.received if isinstance(message, Tokenize)]
        assert isinstance(call.prompt, ChatPrompt)
        assert orjson.loads(call.prompt.chat_template_kwargs) == default


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"add_generation_prompt": None, "continue_final_message": False}, (True, False)),
    ],
)
def test_how_the_prompt_ends(server: ApiServer, fields: dict[str, Any], expected: tuple[bool, bool]) -> None:
    prompt = chat_prompt(server, {"messages": MESSAGES, **fields})
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == expected


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    parsers = {"tool_call_parser": "none", "reasoning_parser": "none"}
    about = {"root": str(MODEL), "parent": None, "max_model_len": 256, "input_modalities": ["text"], **parsers}
    about["end_token_ids"] = list(ModelConfig.read(MODEL).eos_token_ids)
    found = client.models.retrieve("alias").model_extra or {}
    found.pop("system_fingerprint")  # `test_fingerprint.py`
    assert found == about
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("org/nobody")
    assert raised.value.code == "model_not_found"


def test_tokenize(server: ApiServer) -> None:
    text = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True, "model": "tiny"}).json()
    assert text == {"count": 2, "max_model_len": 256, "tokens": [97, 98], "token_strs": ["a", "b"]}
    chat = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bytes(chat["tokens"]) == b'["hi"]'
    assert chat["token_strs"] is None
    assert server.post("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/detokenize", {"tokens": [2000]}).status_code == 400
    assert server.post("/tokenize", {"prompt": "ab", "model": "nobody"}).status_code == 404


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": 1}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": 1},
        ),
    ],
)
def test_reasoning_effort_reaches_the_template(server: ApiServer, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert orjson.loads(chat_prompt(server, {"messages": MESSAGES, **fields}).chat_template_kwargs or b"{}") == expected


def test_tools_without_a_format_are_called_if_forced(tmp_path: Path) -> None:
    """A template that shows no tools: the response says so, and forced calls are JSON."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with ApiServer(tmp_path, tool_call_parser="json", shows_tools=False) as server:
        for fields, choice in (({}, None), ({"tool_choice": "required"}, "required")):
            answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": tools, **fields})
            assert (answer.status_code, answer.headers["x-tokamak-dropped"]) == (200, "tools")
            parsing = server.peer.submits()[-1].text.parsing
            assert (parsing.choice if parsing else None) == choice
        stream = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": tools, "stream": True})
        assert stream.headers["x-tokamak-dropped"] == "tools"
        ours = [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}]
        answer = server.post("/v1/responses", {"input": "hi", "tools": ours, "store": False})
        assert answer.headers["x-tokamak-dropped"] == "web_search, tools"
        for fields in ({}, {"tools": tools, "tool_choice": "none"}):
            assert "x-tokamak-dropped" not in server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}).headers


def test_required_calls_need_a_parser(server: ApiServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat_prompt(server, {"messages": MESSAGES, "tools": tools})
    assert server.peer.submits()[-1].text.parsing is None
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ):
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": tools, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("required", ""),
        ({"type": "function", "function": {"name": "h"}}, "'h' is not one of the 2"),
        (("f", "g"), ""),
        (("f", "h"), "'h' is not one of the 2"),
        (("f", "g", "f"), "names a tool twice"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tool_choice_is_validated(thinker: ApiServer, choice: Any, mode: str, says: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    if isinstance(choice, tuple):
        named = [{"type": "function", "function": {"name": name}} for name in choice]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": tools, "tool_choice": choice}
    answer = thinker.post("/v1/chat/completions", body)
    assert answer.status_code == (400 if says else 200), answer.text
    assert says in answer.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, False)),
        ({"separate_reasoning": True, "reasoning_format": "deepseek", "parse_tool_calls": True}, (False, False)),
        ({"separate_reasoning": False}, (False, True)),
        ({"reasoning_format": "none"}, (False, True)),
        ({"reasoning_format": "auto", "parse_tool_calls": False}, (True, False)),
        ({"separate_reasoning": False, "include_reasoning": False}, "include_reasoning"),
        ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
    ],
)
def test_fields_that_leave_markers_in_the_content(
    thinker: ApiServer, fields: dict[str, Any], expected: tuple[bool, bool] | str
) -> None:
    """The fields of SGLang and of llama.cpp."""
    answer = thinker.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    if isinstance(expected, str):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, expected)
        return
    parsing = thinker.peer.submits()[-1].text.parsing
    assert parsing is not None
    assert (parsing.leaves_calls, parsing.leaves_reasoning) == expected


@pytest.mark.parametrize(
    ("form", "has_form"),
    [
        ({}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<a"]}}, False),
    ],
)
def test_answer_follows_tools_or_format(thinker: ApiServer, form: dict[str, Any], has_form: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": [tool], **form}
    assert thinker.post("/v1/chat/completions", body).status_code == 200
    parsing = thinker.peer.submits()[-1].text.parsing
    assert parsing is not None
    assert (parsing.finds_calls, parsing.has_format) == (True, has_form)
