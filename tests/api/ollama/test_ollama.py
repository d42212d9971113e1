"""Ollama's routes with the real client, and what the engine is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import orjson
import pytest

from engine.messages import ChatPrompt, Part, TextPrompt
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.requests import Submitted

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
STRANGE = "a\u2028b\x85c\u2029d\x0be\x1cf"  # at each of these a text of Python's has a line's end
CALLS = [
    Part("reasoning", "Two "),
    Part("reasoning", "cities."),
    Part("content", "I "),
    Part("content", STRANGE),
    Part("call", "weather", 0, "call_a"),
    Part("arguments", '{"city":\n ', 0),
    Part("arguments", '"Rome"}\r\n', 0),
    Part("call", "weather", 1, "call_b"),
]
MADE = [
    {"id": "call_a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
    {"id": "call_b", "function": {"index": 1, "name": "weather", "arguments": {}}},
]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def client(thinker: ApiServer) -> Iterator[ollama.Client]:
    with ollama.Client(thinker.url) as made:
        yield made


@pytest.fixture
def script(thinker: ApiServer) -> Iterator[None]:
    thinker.peer.script = CALLS
    yield
    thinker.peer.script = []


def ask(server: ApiServer, body: dict[str, Any], path: str = "/api/chat") -> httpx.Response:
    asked = {"messages": MESSAGES} if path == "/api/chat" else {"prompt": "hi"}
    return server.post(path, {"stream": False, **asked, **body})


def submit_of(server: ApiServer, body: dict[str, Any], path: str = "/api/chat") -> Submitted:
    """Return what reaches the engine for `body`."""
    options = {"num_predict": 2} | body.pop("options", {})
    answer = ask(server, body | {"options": options}, path)
    assert answer.status_code == 200, answer.text
    return server.peer.submits()[-1]


def messages_of(submit: Submitted) -> list[dict[str, Any]]:
    assert isinstance(submit.prompt, ChatPrompt)
    found: list[dict[str, Any]] = orjson.loads(submit.prompt.messages)
    return found


def test_whole(client: ollama.Client) -> None:
    answer = client.chat("tiny:latest", MESSAGES, options={"num_predict": 20})
    assert (answer.model, answer.message.role, answer.message.content) == ("tiny:latest", "assistant", said_text(20))
    assert (answer.done, answer.done_reason, answer.prompt_eval_count, answer.eval_count) == (True, "length", 6, 20)
    assert answer.message.thinking is answer.message.tool_calls is None
    assert all((answer[name] or 0) >= 0 for name in TIMES)
    assert (answer.total_duration or 0) >= (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0) > 0
    said = client.generate("alias", "hi", options={"num_predict": 20})
    assert (said.model, said.response, said.done_reason) == ("alias", said_text(20), "length")


@pytest.mark.usefixtures("script")
def test_stream_equals_whole(thinker: ApiServer, client: ollama.Client) -> None:
    """The client splits lines at every line end that Python knows."""
    whole = ask(thinker, {"tools": [TOOL]}).json()
    expected = {"role": "assistant", "content": "I " + STRANGE, "thinking": "Two cities.", "tool_calls": MADE}
    assert whole["message"] == expected
    assert (whole["done_reason"], whole["eval_count"]) == ("stop", len(CALLS))
    *pieces, last = client.chat("tiny", MESSAGES, tools=[TOOL], stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == expected["content"]
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Two cities."
    calls = [call for piece in pieces for call in piece.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "Rome"}), ("weather", {})]
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.done_reason, last.message.content, last.eval_count) == (True, "stop", "", len(CALLS))
    said = "".join(piece.response or "" for piece in client.generate("tiny", "hi", stream=True))
    assert said == expected["content"]


def test_lines(thinker: ApiServer) -> None:
    """Streaming is the default, and silence is filled with empty pieces."""
    with thinker.paced(0), httpx.stream("POST", f"{thinker.url}/api/chat", json={"messages": MESSAGES}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.iter_lines()
        silence = orjson.loads(next(lines))
        assert (silence["message"], silence["done"]) == ({"role": "assistant", "content": ""}, False)
        assert silence["created_at"].endswith("Z")
        thinker.peer.credits = None
        rest = [orjson.loads(line) for line in lines]
    assert [each["done"] for each in rest] == [False] * (len(rest) - 1) + [True]
    assert "".join(each["message"]["content"] for each in rest) == said_text(200)


def test_logprobs(thinker: ApiServer) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    for path in ("/api/chat", "/api/generate"):
        for more in ({}, {"raw": True} if path == "/api/generate" else {}):
            whole = ask(thinker, body | more, path).json()["logprobs"]
            lines = ask(thinker, body | more | {"stream": True}, path).content.splitlines()
            assert [entry for each in lines for entry in orjson.loads(each).get("logprobs", [])] == whole
            assert [entry["token"] for entry in whole] == list(said_text(3))
            assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


def test_options_act(thinker: ApiServer) -> None:
    options = {
        **{"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "typical_p": 0.5, "seed": 9, "num_predict": 5},
        **{"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_last_n": -1, "stop": ["x", "y"]},
        **{"num_ctx": 64, "num_gpu": 1, "mirostat": 0, "tfs_z": 1.0, "num_thread": 3, "nobody_knows": 5},
    }
    for path, body in (("/api/chat", {}), ("/api/generate", {}), ("/api/generate", {"raw": True})):
        submit = submit_of(thinker, {"options": options, **body}, path)
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p) == (
            0.5,
            7,
            0.75,
            0.25,
            0.5,
        )
        assert (sampling.seed, sampling.max_tokens, submit.text.stop) == (9, 5, ["x", "y"])
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    off = submit_of(thinker, {"options": {"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}}).sampling
    assert (off.repetition_penalty, off.presence_penalty) == (1.0, 0.0)
    assert submit_of(thinker, {"options": {"num_predict": 9999}}).text.is_max_tokens_cut
    for unlimited in (0, -1, -2):
        assert submit_of(thinker, {"options": {"num_predict": unlimited}}).sampling.max_tokens == -1
    first, second = (submit_of(thinker, {"options": {"seed": -1}}).sampling.seed for _ in range(2))
    assert first != second


def test_formats_and_thinking(thinker: ApiServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for path, body in (("/api/chat", {}), ("/api/generate", {}), ("/api/generate", {"raw": True})):
        for given, expected in (("json", {"type": "object"}), (schema, schema), ({}, {})):
            found = submit_of(thinker, {"format": given, **body}, path).text.format
            assert found is not None
            assert (found.kind, orjson.loads(found.text)) == ("json", expected)
        assert submit_of(thinker, {"format": "", **body}, path).text.format is None
    for think, kwargs in (
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ("max", {"reasoning_effort": "xhigh", "enable_thinking": True, "thinking": True}),
    ):
        for path in ("/api/chat", "/api/generate"):
            prompt = submit_of(thinker, {"think": think}, path).prompt
            assert isinstance(prompt, ChatPrompt)
            assert orjson.loads(prompt.chat_template_kwargs) == kwargs
    assert submit_of(thinker, {"truncate": True}).text.truncate_prompt_tokens == -1


def test_a_conversation(thinker: ApiServer) -> None:
    """Tool results get the ids of their calls, which clients drop."""

    def called(*names: str) -> list[dict[str, Any]]:
        return [{"function": {"name": name, "arguments": {"a": 1}}} for name in names]

    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": called("f", "g", "h")},
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
        {"role": "tool", "content": "of h", "tool_call_id": "own"},
        {"role": "assistant", "tool_calls": [{"id": "own", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "of own"},
    ]
    submit = submit_of(thinker, {"messages": turns, "tools": [TOOL]})
    found = messages_of(submit)
    assert [message["role"] for message in found] == [turn["role"] for turn in turns]
    ids = [call["id"] for call in found[2]["tool_calls"]]
    assert len({*ids}) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert found[2]["reasoning_content"] == "hm"
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [message.get("tool_call_id") for message in found if message["role"] == "tool"] == [ids[1], ids[0], "own", ids[2]]
    assert submit.prompt.add_generation_prompt  # type: ignore[union-attr]
    cut = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1'}}]}
    (call,) = messages_of(submit_of(thinker, {"messages": [*MESSAGES, cut, {"role": "tool", "content": "r"}]}))[-2][
        "tool_calls"
    ]
    assert call["function"]["arguments"] == '{"a": 1'
    going_on = submit_of(thinker, {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}]}).prompt
    assert isinstance(going_on, ChatPrompt)
    assert (going_on.continue_final_message, going_on.add_generation_prompt) == (True, False)
    forced = submit_of(thinker, {"tools": [TOOL], "tool_choice": "required"}).text.parsing
    assert forced is not None
    assert (forced.choice, forced.binds) == ("required", True)


def test_prompts(thinker: ApiServer) -> None:
    system = messages_of(submit_of(thinker, {"system": "s"}, "/api/generate"))
    assert system == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    for body, expected in (({"raw": True}, TextPrompt("hi")), ({"suffix": "there"}, TextPrompt("hi", True, "there"))):
        assert submit_of(thinker, body, "/api/generate").prompt == expected


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_empty_request_loads_or_unloads(thinker: ApiServer, path: str, field: str) -> None:
    """A request without a prompt loads or unloads a model."""
    num_before = len(thinker.peer.submits())
    for body, reason in (({}, "load"), ({"keep_alive": 0}, "unload"), ({"keep_alive": "5m"}, "load")):
        answer = thinker.post(path, {"model": "tiny", **body})
        assert (answer.status_code, answer.json()["done"], answer.json()["done_reason"]) == (200, True, reason)
        assert field in answer.json()
    assert len(thinker.peer.submits()) == num_before


def test_models(thinker: ApiServer, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny:latest", "alias:latest"]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("tiny:latest", 256)
    (listed, _) = client.list().models
    assert (listed.digest, listed.size) == (running.digest, running.size)
    assert (listed.size or 0) > 10_000
    for name in ("tiny", "tiny:latest", "alias:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.details is not None
        assert (shown.details.family, shown.details.format) == ("qwen3", "safetensors")
        assert (shown.modelinfo or {})["qwen3.context_length"] == 256
    assert tuple(map(int, thinker.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    assert httpx.head(thinker.url).status_code == 200


def test_pull_of_a_served_model_succeeds(thinker: ApiServer, client: ollama.Client) -> None:
    """`codex --oss` and others pull their model if /api/tags lists it only with a tag."""
    for name in ("tiny", "tiny:latest", "alias"):
        assert client.pull(name).status == "success"
        assert [each.status for each in client.pull(name, stream=True)] == ["pulling manifest", "success"]


@pytest.mark.parametrize("name", ["tiny:latest", "alias:latest"])
def test_latest_tag_is_accepted_in_every_api(thinker: ApiServer, name: str) -> None:
    """Ollama's clients learn names with a tag from /api/tags and use them in OpenAI's routes."""
    turns = [{"role": "user", "content": "a"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": turns, "max_tokens": 2}),
    ):
        answer = thinker.post(path, {"model": name, **fields})
        assert (answer.status_code, answer.json().get("model")) == (200, name.removesuffix(":latest")), (path, answer.text)


def test_model_changes_are_refused_with_advice(thinker: ApiServer, client: ollama.Client) -> None:
    for order in (
        lambda: client.pull("llama3"),
        lambda: next(client.pull("llama3", stream=True)),
        lambda: client.push("llama3"),
        lambda: client.create("mine", from_="llama3"),
        lambda: client.copy("tiny", "other"),
        lambda: client.delete("tiny"),
        lambda: client.create_blob(__file__),
    ):
        with pytest.raises(ollama.ResponseError, match="--model") as raised:
            order()
        assert raised.value.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", {"model": "llama3"}, 404, "'llama3' does not exist; available: tiny, alias"),
        ("/api/show", {"name": "llama3:latest"}, 404, "'llama3:latest' does not exist"),
        ("/api/nothing", {}, 404, "not found"),
        ("/api/tags", {}, 405, "not allowed"),
        ("/api/chat", {"messages": [{"content": "a"}]}, 400, "messages[0].role is required"),
        ("/api/chat", {"messages": [{"role": "user", "content": ["a"]}]}, 400, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["AAAA"]}]}, 400, "messages[0]: this model accepts only text"),
        ("/api/generate", {"images": ["AAAA"]}, 400, "images: this model accepts only text"),
        ("/api/chat", {"options": {"temperature": 3}}, 400, "options.temperature"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"tfs_z": 0.5}}, 400, "options.tfs_z"),
        ("/api/chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "options.repeat_last_n: 64"),
        ("/api/chat", {"options": {"num_predict": -3}}, 400, "options.num_predict"),
        ("/api/chat", {"options": []}, 400, "options"),
        ("/api/chat", {"think": "much"}, 400, "think"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"tools": [TOOL, TOOL]}, 400, "tools: two functions"),
        ("/api/chat", {"top_logprobs": 1}, 400, "top_logprobs"),
        ("/api/chat", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: 21 exceeds the limit"),
        ("/api/chat", {"shift": True}, 400, "shift"),
        ("/api/generate", {"template": "x"}, 400, "template"),
        ("/api/generate", {"context": [1, 2]}, 400, "context"),
        ("/api/generate", {"raw": True, "system": "s"}, 400, "system: cannot be combined with raw"),
        ("/api/generate", {"suffix": "s", "think": True}, 400, "think: cannot be combined with suffix"),
        ("/api/generate", {"raw": True, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: 21 exceeds the limit"),
        ("/api/generate", {"prompt": "!reject 400", "raw": True}, 400, "refused"),
        ("/api/embed", {"input": "a"}, 400, "text generation"),
        ("/api/embeddings", {"prompt": "a"}, 400, "text generation"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes(thinker: ApiServer, path: str, body: dict[str, Any], status: int, says: str, stream: bool) -> None:
    answer = ask(thinker, body | {"stream": stream}, path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert says in answer.json()["error"]


def test_a_model_that_does_not_think(server: ApiServer) -> None:
    assert "has no reasoning that can be parsed" in ask(server, {"think": True}).json()["error"]
    assert ask(server, {"think": False, "options": {"num_predict": 1}}).status_code == 200


def test_an_error_ends_a_stream(thinker: ApiServer) -> None:
    with thinker.paced(3), httpx.stream("POST", f"{thinker.url}/api/chat", json={"messages": MESSAGES}) as answer:
        lines = answer.iter_lines()
        first = orjson.loads(next(lines))
        assert not first["done"]
        thinker.order("abort", {"request_id": answer.headers["x-request-id"]})
        *_, last = lines
    assert orjson.loads(last) == {"error": "an operator aborted the request"}
