"""A request of every kind that the API takes, and its whole answer, for comparisons byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from tests.e2e import protocols
from tests.e2e.workload import Body, event_lines
from tests.waiting import WATCHDOG_S

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OF_THIS_REQUEST = ("id", "created", "weight_version")  # an answer's fields that say when it was asked, not what
NEVER = ["never said"]
GROWING = ("text", "content", "reasoning_content", "reasoning")  # strings that a stream sends in pieces


NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
TOOLS = [{"type": "function", "function": {"name": "set_flag", "parameters": protocols.FLAG}}]
THINKS = {"continue_final_message": True, "add_generation_prompt": False}  # with a message that ends within thinking


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    body: Body


def every_kind(max_tokens: int) -> list[Call]:
    """Return requests of every kind. No two prompts share a block, so with an empty prefix cache no answer has cached
    tokens."""
    completions: list[Body] = [
        {"logprobs": 3, "return_token_ids": True, "priority": -3},
        {"temperature": 0, "priority": 7, "stream": False},
        {"ignore_eos": False, "timeout": 3600, "return_token_ids": True},
        {"n": 3, "logprobs": 0},
        {"n": 2, "best_of": 4, "stream": False},
        {"best_of": 3, "logprobs": 2, "stream": False},
        {"echo": True, "logprobs": 2},
        {"echo": True, "n": 2, "stream": False},
        {"echo": True, "prompt_logprobs": 1, "stream": False},
        {"prompt_logprobs": 2, "temperature": 0, "stream": False},
        {"prompt_logprobs": 0, "logprobs": 1, "stream": False},
        {"stop_token_ids": [*range(40, 300)], "min_tokens": max_tokens // 2, "return_token_ids": True},
        {"bad_words": ["the", " a"], "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"allowed_token_ids": [*range(100, 200)], "logit_bias": {"150": 3.0}, "top_k": 20},
        {"stop": NEVER, "logprobs": 1},
        {"stop": NEVER, "include_stop_str_in_output": True, "return_token_ids": True},
        {"stop": NEVER, "stream": False},
        {"guided_regex": "([a-z]+ [0-9]{2,3}[.] ){99,}", "return_token_ids": True, "logprobs": 1},
        {"response_format": {"type": "json_object"}, "n": 2, "min_tokens": max_tokens // 2},
        {"structured_outputs": {"grammar": 'root ::= "[" n ("," n)* "]"\nn ::= [0-9]+'}, "temperature": 0, "stream": False},
    ]
    chats: list[Body] = [
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2, "return_token_ids": True, "priority": 2},
        {"temperature": 0, "stream": False},
        {"n": 2, "best_of": 3, "stream": False},
        {"stop": NEVER},
        {"stop": NEVER, "include_stop_str_in_output": True, "logprobs": True},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2},
        {"tools": TOOLS, **THINKS, "thinking_token_budget": max_tokens // 3, "tool_choice": "required"},
        {**THINKS, "thinking_token_budget": max_tokens // 2, "stream": False},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": NUMBERS}}, "n": 2},
    ]
    calls = [Call(COMPLETIONS, {"prompt": words(index, 10 + 4 * index), **own}) for index, own in enumerate(completions)]
    calls.append(Call(COMPLETIONS, {"prompt": [words(50, 40), words(51, 3), words(52, 90)], "n": 2}))
    for index, own in enumerate(chats):
        thinks = [{"role": "assistant", "content": "<think>"}] if own.keys() >= THINKS.keys() else []
        calls.append(Call(CHAT, {"messages": conversation(60 + index) + thinks, **own}))
    completed = [_completed(call, seed, max_tokens) for seed, call in enumerate(calls)]
    return [*completed, *(Call(path, body) for path, body in protocols.conversations(max_tokens))]


def words(number: int, count: int) -> str:
    """Return a text that begins with its number."""
    return " ".join(f"{number}{'abcdefghij'[(number * 7 + index * index) % 10]}{index}" for index in range(count))


def conversation(number: int) -> list[Json]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": words(number + 10 * turn, 15)} for turn, role in enumerate(roles)]


def _completed(call: Call, seed: int, max_tokens: int) -> Call:
    body: Body = {"max_tokens": max_tokens, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True, "seed": seed, "stream": True}
    body |= call.body
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return Call(call.path, body)


def with_late_stops(calls: Iterable[Call], answers: Iterable[Json]) -> list[Call]:
    """Give requests with a stop string one that occurs only in the second half of the text that was answered."""
    found = []
    for call, answer in zip(calls, answers, strict=True):
        stop = ""
        if "stop" in call.body:
            choice = answer["choices"][0]
            text = str(choice.get("text") or choice["delta"]["content"])
            late = [text[at : at + 5] for at in range(len(text) // 2, len(text) - 5)]
            stop = next((piece for piece in late if piece.isprintable() and text.find(piece) >= len(text) // 2), "")
        found.append(Call(call.path, call.body | {"stop": [stop, *NEVER]}) if stop else call)
    return found


async def ask_all(url: str, calls: list[Call], on_delta: Callable[[], None] = lambda: None) -> list[Json]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=2 * WATCHDOG_S, limits=limits) as client:
        return list(await asyncio.gather(*(ask(client, call, on_delta) for call in calls)))


async def ask(client: httpx.AsyncClient, call: Call, on_delta: Callable[[], None]) -> Json:
    """Return the whole answer except the fields `OF_THIS_REQUEST`: choices by index, a stream's chunks put together."""
    async with client.stream("POST", call.path, json=call.body) as response:
        chunks: list[Json] = []
        if not call.body["stream"] or response.status_code != 200:
            chunks.append(orjson.loads(await response.aread()))
        else:
            async for line in event_lines(response):
                if line.startswith((b"data: {", b"{")):
                    chunks.append(orjson.loads(line.removeprefix(b"data: ")))
                    on_delta()
        assert response.status_code == 200, (call, chunks)
        request_id = response.headers["x-request-id"]
    if call.path in protocols.PATHS:
        return protocols.put_together(chunks, request_id)
    answer: Json = {}
    for chunk in chunks:
        put_together(answer, chunk)
    assert "error" not in answer, (call, answer)
    return protocols.named(answer, protocols.named_ids(request_id, ""))


def put_together(whole: Json, chunk: Json) -> None:
    for key, value in chunk.items():
        if (key in OF_THIS_REQUEST and "choices" in chunk) or value is None:
            continue
        if key == "choices":
            choices = whole.setdefault(key, {})
            for choice in value:
                put_together(choices.setdefault(choice["index"], {}), choice)
        elif isinstance(value, dict):
            put_together(whole.setdefault(key, {}), value)
        elif isinstance(value, list):
            whole.setdefault(key, []).extend(value)
        elif key in GROWING:
            whole[key] = whole.get(key, "") + value
        else:
            whole[key] = value
