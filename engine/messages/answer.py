"""Answers to requests, and to /tokenize and /detokenize.

scheduler -> tokenizer    Outputs, Rejected
tokenizer -> api          Deltas, Rejected, Tokenized, Detokenized
"""

from __future__ import annotations

import msgspec

from engine.messages.sampling import DecodedLogprobs, TokenLogprobs

# ------------------------------------------------------------------------------------------------ scheduler -> tokenizer


class Output(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    attempt: int
    token_ids: list[int]
    finish_reason: str = ""  # "" | "stop" | "length" | "abort" | "timeout"
    stop_token_id: int = -1  # the stop token that ended it (the last of token_ids)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[TokenLogprobs] = []  # one per token; all 0 if the sequence wants none
    prompt_logprobs: list[TokenLogprobs] = []  # of further prompt tokens after the first, in order, each once
    num_computed_tokens: int = 0  # prompt tokens computed so far, if progress was requested
    pooled: bytes = b""  # float32, with the last output of a pooled sequence


class Outputs(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Everything that one step produced for the requests of one tokenizer: one record per step and tokenizer."""

    outputs: list[Output]


class Rejected(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A request that does not run, or no longer runs: an HTTP status with OpenAI's error fields."""

    request_id: str
    attempt: int
    api: str
    status: int
    message: str
    code: str = ""
    param: str = ""
    retry_after_s: int = 0


# ------------------------------------------------------------------------------------------------------ tokenizer -> api


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A piece of an answer, of one kind. A tool call is one `call` part with the function's name as text, followed by
    `arguments` parts: pieces of JSON text that together form an object."""

    kind: str  # "content" | "reasoning" | "call" | "arguments"
    text: str
    call_index: int = -1  # index of a call (also for its arguments) among the calls of the sequence, from 0
    call_id: str = ""  # for a call
    begin: int = -1  # for content and reasoning: the sequence's tokens [begin, end), without markers
    end: int = -1  # -1: all tokens since the previous part


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Tokens and the text they released (text held back for half characters or possible stop strings comes later)."""

    request_id: str
    attempt: int
    token_ids: list[int]
    text: str  # of the content
    finish_reason: str = ""  # "" | "stop" | "length" | "repetition" | "abort" | "timeout"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[DecodedLogprobs] = []  # for each token; token bytes only if log-probabilities were requested
    prompt_token_ids: bytes = b""  # int32, in the first Delta if requested
    prompt_logprobs: list[DecodedLogprobs] = []  # of further prompt tokens, in order, each once
    first_prompt_token: bytes = b""  # it has no log-probability; in the first Delta if prompt log-probabilities are wanted
    replica: int = -1  # the replica that computed it; -1: none
    num_accepted_prediction_tokens: int = 0  # of the request's prediction, in the last Delta
    num_rejected_prediction_tokens: int = 0
    num_computed_tokens: int = 0  # as in Output
    parts: list[Part] = []  # all released parts in order, content included; empty: `text` is all
    num_reasoning_tokens: int = 0  # of the sequence so far

    @property
    def all_parts(self) -> list[Part]:
        return self.parts or ([Part("content", self.text)] if self.text else [])

    pooled: bytes = b""  # float32, in the last Delta of a pooled sequence


class Deltas(msgspec.Struct, tag=True, array_like=True, gc=False):
    deltas: list[Delta]


class Tokenized(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    token_ids: bytes  # int32
    max_model_len: int
    tokens: list[bytes] = []


class Detokenized(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    text: str
