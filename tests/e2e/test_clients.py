"""Ollama's own client, and bodies as Claude Code, Codex, OpenCode and Open WebUI send them (`clients/`), against a real engine.

The embedded model cannot use tools by itself, so that each turn names the one to be called, which its client would not; the
arguments are then what the tool's schema leaves. Its prompts are made longer than it was trained for, with a chat template of
which an answer never begins within thinking, which it would not end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import ollama
import orjson
import pytest

from tests.e2e.agents import AGENTS, RECORDED, Json
from tests.e2e.checkpoints import longer
from tests.e2e.engine_process import DEMO, EngineProcess
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S

KEY = {"authorization": "Bearer secret"}
QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = longer(DEMO, tmp_path_factory.mktemp("longer") / "model", 8192)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    parsers += ("--chat-template", str(REPOSITORY / "tests/e2e/clients/chat_template.jinja"))
    with EngineProcess(model, "--api-key", "secret", "--served-model-name", "demo", *parsers) as running:
        yield running
        assert running.metric("http_responses_total", status="5xx") == 0


@pytest.fixture(scope="module")
def client(engine: EngineProcess) -> Iterator[ollama.Client]:
    with ollama.Client(engine.url, headers=KEY) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------------- Ollama's


def test_chat_and_generate(client: ollama.Client) -> None:
    whole = client.chat("demo", QUESTION, options=GREEDY)
    assert "42" in (whole.message.content or "")
    assert (whole.done, whole.done_reason) == (True, "stop")
    *pieces, last = client.chat("demo:latest", QUESTION, options=GREEDY, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert client.generate("demo", "What is 12 + 30?", options=GREEDY).response == whole.message.content
    raw = client.generate(
        "demo", "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n", raw=True, options=GREEDY
    )
    assert (raw.response, raw.prompt_eval_count) == (whole.message.content, whole.prompt_eval_count)
    text = whole.message.content or ""
    cut = client.chat("demo", QUESTION, options={**GREEDY, "stop": [text[3:5]]})
    assert (cut.message.content, cut.done_reason) == (text[:3], "stop")
    limited = client.generate("demo", "What is 12 + 30?", options={**GREEDY, "num_predict": 3})
    assert (limited.done_reason, limited.eval_count) == ("length", 3)
    options = [{"seed": seed, "num_predict": 30, "temperature": 2} for seed in (5, 5, 6)]
    first, again, other = (client.generate("demo", "Once", raw=True, options=each).response for each in options)
    assert first == again != other


def test_formats_are_enforced(client: ollama.Client) -> None:
    found = client.chat("demo", QUESTION, format=SUM, options=GREEDY)
    jsonschema.validate(json.loads(found.message.content or ""), SUM)
    streamed = client.generate("demo", "What is 12 + 30?", format=SUM, options=GREEDY, stream=True)
    jsonschema.validate(json.loads("".join(piece.response or "" for piece in streamed)), SUM)
    with pytest.raises(ollama.ResponseError, match=r"format.*https://example.com") as raised:
        client.chat("demo", QUESTION, format={"$ref": "https://example.com/x"})
    assert raised.value.status_code == 400


def test_thinking(client: ollama.Client) -> None:
    """The answer is continued, because the model would not begin to think by itself."""
    turns = [*QUESTION, {"role": "assistant", "content": "<think>"}]
    whole = client.chat("demo", turns, options={**GREEDY, "num_predict": 20})
    assert whole.message.thinking
    pieces = client.chat("demo", turns, options={**GREEDY, "num_predict": 20}, think=True, stream=True)
    assert "".join(piece.message.thinking or "" for piece in pieces) == whole.message.thinking


def test_a_tool_is_called_and_answers(engine: EngineProcess, client: ollama.Client) -> None:
    def measure(unit: str) -> int:
        """Measure something."""
        return len(unit)

    unit = {
        "type": "object",
        "properties": {"unit": {"enum": ["m", "km"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "measure", "parameters": unit}}]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": "required", "options": GREEDY, "stream": False}
    first = httpx.post(f"{engine.url}/api/chat", json=body, headers=KEY, timeout=WATCHDOG_S).json()["message"]
    (call,) = first["tool_calls"]
    assert (call["function"]["name"], [*call["function"]["arguments"]]) == ("measure", ["unit"])
    turns = [*QUESTION, first, {"role": "tool", "tool_name": "measure", "content": "42"}]
    assert client.chat("demo", turns, tools=[measure], options={**GREEDY, "num_predict": 5}).eval_count in range(1, 6)


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["demo:latest"]
    assert [model.context_length for model in client.ps().models] == [8192]
    shown = client.show("demo")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.modelinfo or {})["general.parameter_count"] > 1_000_000


def test_mistakes(engine: EngineProcess, client: ollama.Client) -> None:
    for ask, status, says in (
        (lambda: client.chat("llama3", QUESTION), 404, "does not exist"),
        (lambda: next(client.chat("llama3", QUESTION, stream=True)), 404, "does not exist"),
        (lambda: client.chat("demo", [{"role": "user", "content": "x" * 50_000}]), 400, "maximum context length"),
        (lambda: client.generate("demo", "a", suffix="b"), 400, "suffix"),
        (lambda: client.generate("demo", "a", images=[b"abc"]), 400, "images"),
        (lambda: client.embed("demo", "a"), 400, "text generation"),
    ):
        with pytest.raises(ollama.ResponseError, match=says) as raised:
            ask()
        assert raised.value.status_code == status
    with ollama.Client(engine.url) as stranger, pytest.raises(ollama.ResponseError, match="key"):
        stranger.list()


# ------------------------------------------------------------------------------------------------------------------ others


@pytest.mark.parametrize("name", RECORDED)
def test_two_turns_with_a_tool_each(engine: EngineProcess, name: str) -> None:
    """Each turn must make the given calls; the second one finds the first's prompt and answer in the cache."""
    recorded, agent = RECORDED[name], AGENTS[name]
    body = recorded["body"]
    num_before = 0  # tokens of the prompt before
    for turn in recorded["turns"]:
        num_cached = engine.metric("prefix_cache_hits_total")
        events = ask(engine, recorded, body | {"tool_choice": turn["choice"]})
        num_cached = engine.metric("prefix_cache_hits_total") - num_cached
        assert agent.call(events)[1:] == (turn["name"], turn["arguments"])
        num_tokens, told = agent.prompt(events)
        assert num_cached >= 0.9 * num_before
        assert told in (num_cached, None)
        num_before = num_tokens
        body = agent.next_body(body, events, turn["result"])
    assert num_before > 300


def test_a_patch_follows_its_grammar(engine: EngineProcess) -> None:
    """The model does not know how to end a patch, so only the beginning is checked."""
    recorded = RECORDED["codex"]
    body = recorded["body"] | {
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 200,
        "temperature": 0,
    }
    *_, last = ask(engine, recorded, body)
    (item,) = last["response"]["output"]
    text = item.get("input") or item["content"][0]["text"]
    assert any(
        f"*** Begin Patch{end}*** {kind} File: " in text for end in ("\\n", "\n") for kind in ("Add", "Update", "Delete")
    )


def test_open_webui_looks_around_and_names_a_chat(engine: EngineProcess) -> None:
    recorded = RECORDED["open_webui"]
    for path in ("/api/version", "/api/tags", "/api/ps", "/v1/models"):
        assert httpx.get(engine.url + path, headers=KEY | recorded["headers"], timeout=WATCHDOG_S).status_code == 200
    (title,) = ask(engine, recorded, recorded["title"])
    assert title["message"]["content"]
    assert title["done"]


def ask(engine: EngineProcess, recorded: Json, body: Json) -> list[Json]:
    """Return the events of the answer."""
    headers = recorded["headers"] | KEY
    answer = httpx.post(engine.url + recorded["path"], json=body, headers=headers, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n")]
    return [orjson.loads(line) for line in lines if line.startswith("{")]
