"""Parameters of vLLM and llama.cpp beside OpenAI's: those that the api handles, and those that it passes to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from engine.messages import ChatPrompt, Part, RepetitionLimits, TextPrompt, Tokenize
from tests.api.api_server import ApiServer
from tests.api.client.test_streams import events
from tests.api.tokenizer_peer import said_text

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
GOING_ON = {"messages": MESSAGES, "max_tokens": 3, "continue_final_message": True, "add_generation_prompt": False}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_tokens_called_by_their_ids(server: ApiServer) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    whole = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == [f"token_id:{token_id}" for token_id in b"ab" + said_text(2).encode()]
    assert list(whole["top_logprobs"][2]) == ["token_id:81", "token_id:80"]
    first = events(server.post(COMPLETIONS, body | {"stream": True}))[0]["choices"][0]["logprobs"]
    assert first["tokens"][:2] == ["token_id:97", "token_id:98"]
    body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    (entry,) = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:80", [80])
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:81", "token_id:80"]


def test_log_probabilities_by_id(server: ApiServer) -> None:
    """`logprobs_by_id` has the format of prompt log-probabilities and replaces the usual field."""
    for path, fields in ((COMPLETIONS, {"prompt": "ab", "logprobs": 2}), (CHAT, {"messages": MESSAGES, "logprobs": True})):
        body = fields | {"max_tokens": 2, "return_token_ids": True}
        usual = server.post(path, body | {"logprobs_by_id": False}).json()["choices"][0]
        choice = server.post(path, body | {"logprobs_by_id": True}).json()["choices"][0]
        assert (usual["logprobs"] is None, choice["logprobs"], "logprobs_by_id" in usual) == (False, None, False)
        rows = choice["logprobs_by_id"]
        assert [len(row) for row in rows] == [2 if path == COMPLETIONS else 1] * 2
        own = [row[str(token_id)] for row, token_id in zip(rows, choice["token_ids"], strict=True)]
        assert "".join(entry["decoded_token"] for entry in own) == said_text(2)
        assert {(*entry,) for entry in own} == {("logprob", "rank", "decoded_token")}


def test_continued_message_is_echoed(server: ApiServer) -> None:
    body = GOING_ON | {"echo": True, "n": 2}
    whole = server.post(CHAT, body).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == [f"Well, {said_text(3, index)}" for index in (0, 1)]
    pieces = [choice for event in events(server.post(CHAT, body | {"stream": True})) for choice in event["choices"]]
    for index in (0, 1):
        streamed = "".join(piece["delta"].get("content", "") for piece in pieces if piece["index"] == index)
        assert streamed == f"Well, {said_text(3, index)}"


def test_parameters_reach_the_engine(server: ApiServer) -> None:
    body = {
        "prompt": "before",
        "suffix": "behind",
        "max_tokens": 1,
        "logprobs": 0,
        "cache_salt": "tenant",
        "truncate_prompt_tokens": 4,
        "logprob_token_ids": [7, 9],
        "repetition_detection": {"max_pattern_size": 8, "min_count": 3},
    }
    assert server.post(COMPLETIONS, body).status_code == 200
    submit = server.peer.submits()[-1]
    assert submit.prompt == TextPrompt("before", True, "behind")
    assert submit.options.cache_salt == "tenant"
    assert submit.text.truncate_prompt_tokens == 4
    assert submit.text.repetition == RepetitionLimits(8, 1, 3)
    assert (submit.sampling.logprob_token_ids, submit.sampling.num_logprobs) == ([7, 9], 0)
    samplers = {"top_n_sigma": 1.5, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8}
    dry = {"dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, **samplers, **dry}).status_code == 200
    submit = server.peer.submits()[-1]
    assert {name: getattr(submit.sampling, name) for name in samplers} == samplers
    assert (submit.sampling.dry_base, submit.sampling.dry_allowed_length, submit.sampling.dry_last_n) == (2.0, 3, 64)
    assert submit.text.dry_breakers == ["\n", ":", '"', "*"]
    documents = [{"title": "A", "text": "b"}]
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "documents": documents}).status_code == 200
    prompt = server.peer.submits()[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.documents == b'[{"title":"A","text":"b"}]'


def test_timings(server: ApiServer) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": MESSAGES})):
        body = {**prompt, "max_tokens": 5, "timings": True}
        whole = server.post(path, body).json()
        streamed = events(server.post(path, body | {"stream": True}))
        each = events(server.post(path, {**prompt, "max_tokens": 5, "stream": True, "timings_per_token": True}))
        assert [event["timings"] for event in streamed if "timings" in event] == [streamed[-1]["timings"]]
        assert all("timings" in event for event in each)
        for timings in (whole["timings"], streamed[-1]["timings"], each[-1]["timings"]):
            assert timings["predicted_n"] == 5
            assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
            assert timings["prompt_ms"] > 0
        assert "timings" not in server.post(path, {**prompt, "max_tokens": 1}).json()


def test_a_rendered_conversation(server: ApiServer) -> None:
    rendered = server.post(f"{CHAT}/render", {"messages": MESSAGES}).json()
    assert rendered["prompt"] == '["hi","Well, "]'
    assert rendered["token_ids"] == list(rendered["prompt"].encode())
    assert server.post(f"{CHAT}/render", {"messages": []}).status_code == 400
    server.post(f"{CHAT}/render", {"messages": MESSAGES, "truncate_prompt_tokens": 5, "max_tokens": 7})
    asked = [message for message in server.peer.received if isinstance(message, Tokenize)][-1]
    assert (asked.truncate_prompt_tokens, asked.max_tokens) == (5, 7)
    refused = server.post(f"{CHAT}/render", {"messages": MESSAGES, "truncate_prompt_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert server.post(f"{CHAT}/render", {"messages": MESSAGES, "temperature": 9}).json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [1, 2], "suffix": "x"}, "suffix"),
        (COMPLETIONS, {"suffix": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"truncate_prompt_tokens": 3, "echo": True}, "echo"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": []}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [99999]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": list(range(21))}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection"),
        (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}}, None),
        (COMPLETIONS, {"timings_per_token": True}, "timings_per_token"),
        (CHAT, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs_by_id": True}, "logprobs_by_id"),
        (COMPLETIONS, {"logprobs_by_id": True, "logprobs": 0, "stream": True}, "logprobs_by_id"),
        (COMPLETIONS, {"logprobs_by_id": True, "logprobs": 0, "echo": True}, "echo"),
        (CHAT, {"logprobs_by_id": True}, "logprobs_by_id"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"documents": "x"}, "documents"),
    ],
)
def test_invalid_combinations_are_refused(server: ApiServer, path: str, fields: dict[str, Any], param: str | None) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    answer = server.post(path, {**prompt, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == (param or "repetition_detection")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 32_000}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 32_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 32_000}),
        ("/api/generate", {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 32_000}}),
    ],
)
def test_max_tokens_is_cut_to_the_room(server: ApiServer, path: str, body: dict[str, Any]) -> None:
    """`max_tokens` is cut to what fits unless a client of OpenAI's API asks for a refusal."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    (submit,) = server.peer.submits(answer.headers["x-request-id"])
    assert (submit.sampling.max_tokens, submit.text.is_max_tokens_cut) == (32_000, True)
    if path in ("/v1/completions", "/v1/chat/completions"):
        refused = server.post(path, {**body, "fit_max_tokens": False})
        assert refused.status_code == 400
        assert "256 tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "top_p": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 0, "top_k": 50}),
        ("/v1/responses", {"input": "x", "top_p": 0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "top_p": 0}),
        ("/api/generate", {"model": "tiny", "prompt": "x", "stream": False, "options": {"top_p": 0}}),
    ],
)
def test_top_p_zero_draws_the_likeliest(server: ApiServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    (submit,) = server.peer.submits(answer.headers["x-request-id"])
    assert (submit.sampling.top_k, submit.sampling.top_p) == (1, 1.0)


def test_no_chunk_while_a_call_is_held_back(thinker: ApiServer) -> None:
    held = Part("", "")
    thinker.peer.script = [Part("content", "I look."), held, held, held, Part("call", "weather", 0, "call_a"), held, held]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "tools": tools}
    try:
        choices = [event["choices"][0] for event in events(thinker.post("/v1/chat/completions", body))]
    finally:
        thinker.peer.script = []
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices)
    assert choices[0]["delta"]["content"].startswith("I look.")
