"""Requests of every API that a conversation can be had by, in thinking, calls and forms, and their streams put together.

What must be the same in two runs of a request: every event in its order, where pieces of one text in a row are one, and every
id, which is a function of the request. `named_ids` gives ids that are derived from this run's request a name in their place;
another id stays as it is, so that no two runs agree on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from engine.parsers.family import digest
from tests.e2e.workload import Body

Json = dict[str, Any]
MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
PATHS = (MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE)
# as that of the golden checkpoints, and an answer may begin within thinking
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
OPTIONS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--chat-template", TEMPLATE)
FLAG = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"], "additionalProperties": False}
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 20}},
    "required": ["numbers"],
    "additionalProperties": False,
}
_WHEN = ("created_at", "completed_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_MAX_CALLS = 8


def conversations(max_tokens: int) -> list[tuple[str, Body]]:
    """Return path and body of each; no two prompts share a block."""

    def turn(number: int) -> list[Json]:
        return [{"role": "user", "content": " ".join(f"{number}q{word}" for word in range(20))}]

    function = {"name": "set_flag", "parameters": FLAG}
    tool = {"name": "set_flag", "input_schema": FLAG}
    messages: list[Body] = [
        {"tools": [tool], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": max_tokens // 3}},
        {"thinking": {"type": "enabled", "budget_tokens": max_tokens // 2}},
        {"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}, "stream": False},
    ]
    responses: list[Body] = [
        {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]},
        {"tools": [{"type": "function", **function}, {"type": "custom", "name": "say"}], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS}}},
    ]
    ollama: list[Body] = [
        {"think": True},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"format": NUMBERS},
    ]
    common: Body = {"temperature": 1.0, "stream": True}
    asked: list[tuple[str, Body]] = []
    for own in messages:
        asked.append((MESSAGES, {**common, "messages": turn(len(asked) + 200), "max_tokens": max_tokens, **own}))
    for own in responses:
        asked.append((RESPONSES, {**common, "input": turn(len(asked) + 200), "max_output_tokens": max_tokens, **own}))
    options = {"temperature": 1.0, "num_predict": max_tokens, "seed": 11}
    for own in ollama:
        asked.append((OLLAMA_CHAT, {"messages": turn(len(asked) + 200), "options": options, "stream": True, **own}))
    asked.append((OLLAMA_GENERATE, {"prompt": "209 " * 30, "format": "json", "options": options, "stream": True}))
    return [(path, body | {"seed": seed}) for seed, (path, body) in enumerate(asked, start=300)]


def put_together(events: Iterable[Json], request_id: str) -> Json:
    """Return the events of a stream, or the one that is a whole answer, in the form that every run must reproduce.
    `request_id`: from the header of the answer to a request that set none."""
    merged: list[Json] = []
    for number, event in enumerate(each for each in events if each.get("type") != "ping"):
        assert event.pop("sequence_number", number) == number
        texts = _take_texts(event)
        if not _says_something(event, texts):
            continue
        if merged and merged[-1]["event"] == event:
            for place, text in texts.items():
                merged[-1]["texts"][place] = merged[-1]["texts"].get(place, "") + text
        else:
            merged.append({"event": event, "texts": texts})
    assert merged
    assert not any("error" in each["event"] and each["event"]["error"] for each in merged), merged
    return named({"events": merged}, named_ids(request_id, _response_id(merged)))


def _response_id(merged: list[Json]) -> str:
    """Return the id of a stored response; empty for other APIs."""
    responses = (each["event"].get("response") for each in merged)
    return next((response["id"] for response in responses if isinstance(response, dict)), "")


def _says_something(event: Json, texts: Json) -> bool:
    """Return false for lines that only fill a silence."""
    return event.get("done", True) or any(texts.values()) or "tool_calls" in event.get("message", ())


def _take_texts(event: Json) -> Json:
    """Remove the texts from an event and return them by their place."""
    for name in _WHEN:
        event.pop(name, None)
    if isinstance(event.get("response"), dict):
        for name in _WHEN:
            event["response"].pop(name, None)
    texts = {}
    for holder, names in (
        (event, ("delta", "response", "thinking")),
        (event.get("delta"), ("text", "thinking", "partial_json")),
        (event.get("message"), ("content", "thinking")),
    ):
        for name in names:
            if isinstance(holder, dict) and isinstance(holder.get(name), str):
                texts[name] = holder.pop(name)
    return texts


def named_ids(request_id: str, response_id: str) -> dict[str, str]:
    """Return the ids that this request's answer may have, and names for them."""

    def blake(text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    names = {f"msg_{blake(request_id)}": "the message"} | ({response_id: "the response"} if response_id else {})
    for index in range(_MAX_CALLS):
        names |= {f"{kind}_{blake(f'{response_id}.{index}')}": f"{kind} {index}" for kind in ("msg", "rs", "fc", "ctc")}
        for sample in ("", *(f"-{number}" for number in range(_MAX_CALLS))):
            names[f"call_{digest(request_id + sample, index, 12)}"] = f"call {index} of sample{sample}"
    return names


def named(whole: Json, names: dict[str, str]) -> Json:
    """Return the answer with names in place of ids."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [renamed(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    return {key: renamed(value) for key, value in whole.items()}


def without_usage(value: Any) -> Any:
    """Return an answer, or a part of one, without usage, for runs that find different parts of prompts in their caches."""
    if isinstance(value, dict):
        return {key: without_usage(each) for key, each in value.items() if key != "usage"}
    return [without_usage(each) for each in value] if isinstance(value, list) else value
