"""Convert HTTP answers of an engine to outputs and exceptions. Used by `llm.py`."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Mapping
from typing import Any

import orjson

from tokamak.connection import Reply
from tokamak.logprobs import cumulative, logprobs_of
from tokamak.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)


def error_of(reply: Reply, where: str) -> Exception:
    """Return the exception of an error reply: a user's mistake is a ValueError that says `where`."""
    try:
        message = str(orjson.loads(reply.body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = reply.body[:300].decode(errors="replace")
    text = f"{where}: {message}" if where else message
    if reply.status == 408:
        return TimeoutError(text)
    return ValueError(text) if 400 <= reply.status < 500 else RuntimeError(text)


def completion_output(answer: Any, prompt: str | None, has_text: bool) -> RequestOutput:
    """Return the output of `/v1/completions`; `has_text`: whether texts are wanted."""
    texts = [choice["text"] if has_text else "" for choice in answer["choices"]]
    return _output(answer, prompt, answer["choices"][0].get("prompt_logprobs"), texts)


def chat_output(answer: Any, prompt: str | None, has_text: bool) -> RequestOutput:
    """Return the output of `/v1/chat/completions`."""
    messages = [choice["message"] for choice in answer["choices"]]
    texts = [(message["content"] or "") if has_text else "" for message in messages]
    output = _output(answer, prompt, answer.get("prompt_logprobs"), texts)
    for completion, message in zip(output.outputs, messages, strict=True):
        completion.reasoning = message.get("reasoning")
        completion.tool_calls = message.get("tool_calls") or []
    return output


def _output(answer: Any, prompt: str | None, prompt_logprobs: Any, texts: list[str]) -> RequestOutput:
    outputs = []
    for choice, text in zip(answer["choices"], texts, strict=True):
        rows = logprobs_of(choice["logprobs_by_id"]) if "logprobs_by_id" in choice else None
        outputs.append(
            CompletionOutput(
                index=choice["index"],
                text=text,
                token_ids=choice["token_ids"],
                cumulative_logprob=None if rows is None else cumulative(rows, choice["token_ids"]),
                logprobs=rows,
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
            )
        )
    return RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=answer["choices"][0]["prompt_token_ids"],
        prompt_logprobs=None if prompt_logprobs is None else logprobs_of(prompt_logprobs),
        outputs=outputs,
        metrics=_metrics(answer["timings"]),
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def _metrics(timings: Mapping[str, Any]) -> RequestMetrics:
    now = time.time()
    latency, rest = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
    return RequestMetrics(now - latency - rest, latency, now - rest, now, timings["predicted_n"])


def embedding_output(answer: Any) -> EmbeddingRequestOutput:
    (made,) = answer["data"]
    vector = array("f", base64.b64decode(made["embedding"]))
    if sys.byteorder == "big":
        vector.byteswap()
    return EmbeddingRequestOutput(answer["id"], EmbeddingOutput(vector.tolist()), made["prompt_token_ids"])


def scoring_outputs(answer: Any) -> list[ScoringRequestOutput]:
    name = answer["id"]
    return [ScoringRequestOutput(name, ScoringOutput(made["score"]), made["prompt_token_ids"]) for made in answer["data"]]
