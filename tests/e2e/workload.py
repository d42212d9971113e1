"""Requests with every kind of sampling, and their answers, for comparisons byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from tests.e2e.engine_process import OPERATOR, EngineProcess
from tests.waiting import WATCHDOG_S, wait_until

Body = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One stream put together: all that must depend only on the request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    num_completion_tokens: int = -1
    weight_version: str = ""
    error: object = None


def mixed_bodies(count: int, seed: int, max_tokens: int = 32, vocab_size: int = 1000, max_prompt: int = 200) -> list[Body]:
    """Return completion bodies on random token ids: a third greedy, the rest seeded with all sampling options mixed."""
    rng = random.Random(seed)
    bodies = []
    for index in range(count):
        body: Body = {
            "prompt": [rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 5, 16, 17, 40, max_prompt]))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        if index % 3 == 0:
            body["temperature"] = 0
        else:
            body |= {
                "temperature": rng.choice([0.6, 1.0, 1.4]),
                "seed": rng.randrange(1 << 62),
                "top_p": rng.choice([0.7, 0.95, 1.0]),
            }
            body |= {"top_k": rng.choice([0, 5, 50]), "min_p": rng.choice([0.0, 0.02])}
            body |= {"repetition_penalty": rng.choice([1.0, 1.2]), "presence_penalty": rng.choice([0.0, 0.7])}
            body |= {"typical_p": rng.choice([1.0, 0.8]), "top_n_sigma": rng.choice([0.0, 1.5])}
            body |= {"xtc_probability": rng.choice([0.0, 0.5]), "dry_multiplier": rng.choice([0.0, 0.8])}
            body |= {"frequency_penalty": rng.choice([0.0, 0.4]), "logit_bias": rng.choice([{}, {"17": 2.5, "99": -100}])}
        bodies.append(body)
    return bodies


async def stream_one(client: httpx.AsyncClient, body: Body, on_delta: Callable[[], None] | None = None) -> Answer:
    """Send one streaming completion and put its chunks together."""
    answer = Answer()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=wanted) as response:
        if response.status_code != 200:
            answer.error = (response.status_code, (await response.aread()).decode())
            return answer
        async for line in event_lines(response):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                _take_chunk(answer, orjson.loads(line[6:]))
                if on_delta is not None:
                    on_delta()
    return answer


async def event_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a stream's lines as server-sent events define them: httpx would also split at U+0085 or U+2028, which JSON may
    contain."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _take_chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.error = chunk.get("error", answer.error)
    answer.weight_version = str(chunk.get("weight_version") or answer.weight_version)
    if chunk.get("usage"):
        answer.num_completion_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", []):
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        answer.token_logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.stop_reason = choice.get("stop_reason", answer.stop_reason)


async def stream_all(
    url: str, bodies: list[Body], concurrency: int, on_delta: Callable[[], None] | None = None
) -> list[Answer]:
    """Send all bodies, `concurrency` at a time; return answers in the order of the bodies."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(240), limits=limits) as client:

        async def one(body: Body) -> Answer:
            async with gate:
                return await stream_one(client, body, on_delta)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def answers(engine: EngineProcess, bodies: list[Body], concurrency: int = 32) -> list[Answer]:
    """Call `stream_all` from synchronous code; every answer must have ended without an error."""
    return _checked(bodies, asyncio.run(stream_all(engine.url, bodies, concurrency)))


def answers_together(engine: EngineProcess, bodies: list[Body]) -> list[Answer]:
    """Return `answers` to bodies that all wait at a paused engine first: however slow this client is, they compete."""

    async def run() -> list[Answer]:
        async with held(engine):
            streams = asyncio.create_task(stream_all(engine.url, bodies, len(bodies)))
            await asyncio.to_thread(wait_for_waiting, engine, len(bodies))
        return await streams

    return _checked(bodies, asyncio.run(run()))


def wait_for_waiting(engine: EngineProcess, num_requests: int) -> None:
    wait_until(lambda: engine.metric("num_requests_waiting") == num_requests, what=f"{num_requests} requests wait")


@contextlib.asynccontextmanager
async def held(engine: EngineProcess, mode: str = "abort") -> AsyncIterator[None]:
    """Pause the engine within the block, so that requests wait."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S, headers=OPERATOR) as client:
        (await client.post("/admin/pause", json={"mode": mode})).raise_for_status()
        yield
        (await client.post("/admin/resume", json={})).raise_for_status()


def _checked(bodies: list[Body], result: list[Answer]) -> list[Answer]:
    for body, answer in zip(bodies, result, strict=True):
        assert answer.error is None, (body, answer.error)
        assert answer.finish_reason is not None, (body, answer)
    return result
