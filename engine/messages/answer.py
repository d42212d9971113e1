"""A request's answer on its way back, and those to /tokenize and /detokenize.

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
    logprobs: list[TokenLogprobs] = []  # one per token; all 0 where the sequence wants none
    prompt_logprobs: list[TokenLogprobs] = []  # of some more tokens of the prompt after its first, in order, each once
    num_computed_tokens: int = 0  # of the prompt so far, where that was asked for
    pooled: bytes = b""  # float32, with the end of a sequence that is pooled


class Outputs(msgspec.Struct, tag=True, array_like=True, gc=False):
    """All that one step brought for the requests of one tokenizer: one record a step and peer."""

    outputs: list[Output]


class Rejected(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A request that does not run (any more): an HTTP status with OpenAI's error fields."""

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
    """A piece of an answer, of one kind. A call is one `call`, whose text is the function's name, and then `arguments`:
    pieces of JSON text whose sum is an object."""

    kind: str  # "content" | "reasoning" | "call" | "arguments"
    text: str
    call_index: int = -1  # of a call and its arguments, among the sequence's calls from 0
    call_id: str = ""  # of a call
    begin: int = -1  # of content and reasoning: the sequence's tokens [begin, end), none of which is a marker's
    end: int = -1  # -1: all that came since the part before it


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Tokens and the text they released (text held back for half characters or possible stop strings comes later)."""

    request_id: str
    attempt: int
    token_ids: list[int]
    text: str  # of its content
    finish_reason: str = ""  # "" | "stop" | "length" | "repetition" | "abort" | "timeout"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[DecodedLogprobs] = []  # with each token; token bytes only where log-probabilities were asked for
    prompt_token_ids: bytes = b""  # int32, in the first Delta where asked for
    prompt_logprobs: list[DecodedLogprobs] = []  # of some more prompt tokens, in order, each once
    first_prompt_token: bytes = b""  # which has no log-probability; in the first Delta where those of the prompt are wanted
    replica: int = -1  # that made it; -1: none
    num_accepted_prediction_tokens: int = 0  # of the request's prediction, in the last Delta
    num_rejected_prediction_tokens: int = 0
    num_computed_tokens: int = 0  # as of an Output
    parts: list[Part] = []  # all that it released, in order, content too; empty: `text` is all
    num_reasoning_tokens: int = 0  # of the sequence so far

    @property
    def all_parts(self) -> list[Part]:
        return self.parts or ([Part("content", self.text)] if self.text else [])

    pooled: bytes = b""  # float32, in the last Delta of a sequence that is pooled


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
