"""Answers with the attributes of vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from tokamak.logprobs import Logprobs, PromptLogprobs


class CompletionOutput(msgspec.Struct):
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless log-probabilities were requested
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # "stop", "length", ...
    stop_reason: int | str | None = None  # the stop string or stop token; None: the end of the text
    lora_request: Any = None
    reasoning: str | None = None  # with `reasoning_parser`: the reasoning, not part of `text`
    tool_calls: list[dict[str, Any]] = []  # with `tool_call_parser`: tool calls in OpenAI's format

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct):
    """Seconds, as the engine measured them; times since 1970 by this process's clock."""

    arrival_time: float
    first_token_latency: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int


class RequestOutput(msgspec.Struct):
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ScoringOutput(msgspec.Struct):
    score: float


class EmbeddingRequestOutput(msgspec.Struct):
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class ScoringRequestOutput(msgspec.Struct):
    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
