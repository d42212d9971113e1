"""A request on its way to the scheduler, and its answer on the way back.

api -> tokenizer          Submission, Abort, Tokenize, Detokenize
tokenizer -> scheduler    Requests, Abort
scheduler -> tokenizer    Outputs, Rejected
tokenizer -> api          Deltas, Rejected, Tokenized, Detokenized

What the samples of an HTTP request share (prompts, stop strings, bad words, sampling parameters) travels once: a `Submission`
is what the edge sends of several `Submit`s, and `Requests` what the tokenizer makes of it. `Submit` and `Request` are one
sample as each end holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# ----------------------------------------------------------------------------------------------------------------- parts


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one sample of a request is drawn. The tokenizer resolves what needs a vocabulary or a model limit
    (`max_tokens`, `stop_token_ids` with the model's end tokens unless `ignore_eos`, `bad_words_token_ids`)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # u64, always set by the edge, so that a replay draws the same numbers
    sample_index: int = 0  # index among the n samples of one prompt
    min_tokens: int = 0
    max_tokens: int = -1  # -1: up to the model's limit (resolved by the tokenizer)
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the sampled token only; k: the k best besides
    num_prompt_logprobs: int = -1  # likewise, for each prompt token after the first
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    logit_bias: dict[int, float] = {}


class TextOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the tokenizer does with a request's text."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] = []
    return_prompt_token_ids: bool = False  # the first Delta carries them


class TextPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32


class ChatPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """A conversation as the client sent it, to be rendered by the chat template. JSON text of each part."""

    messages: bytes  # JSON list of {"role", "content", ...}
    tools: bytes = b""  # JSON list, or empty
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str = ""  # empty: the model's
    chat_template_kwargs: bytes = b""  # JSON object, or empty


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probability of one token and the best alternatives at its position. Ranks start at 1."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int] = []  # best first
    top_logprobs: list[float] = []


class DecodedLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`TokenLogprobs` with each token's bytes, as the edge shows them (the token itself first, then the best).
    Tuples, because a request may hold very many until its end, and the collector leaves tuples of plain values
    alone."""

    token_id: int
    logprob: float
    rank: int
    token: bytes
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    top_tokens: tuple[bytes, ...] = ()


# ------------------------------------------------------------------------------------------------------ api -> tokenizer


class Submit(msgspec.Struct, gc=False):
    """One sample of a request: the edge's truth, sent again with `attempt + 1` whenever an actor behind it comes back."""

    request_id: str  # unique in the run; samples of one prompt share `group_id`
    api: str  # actor name to answer to
    api_epoch: int
    attempt: int
    prompt: Prompt
    sampling: SamplingParams
    text: TextOptions
    resume_token_ids: bytes = b""  # int32, tokens that the edge already has
    num_scored_prompt_tokens: int = 0  # whose log-probabilities the edge already has (a resubmission)
    group_id: str = ""
    priority: int = 0  # lower runs first
    arrival_ns: int = 0  # CLOCK_MONOTONIC
    deadline_ns: int = 0  # CLOCK_MONOTONIC, 0: none
    key: str = ""  # of the HTTP request: what waits for a ring waits in one queue for each; empty: the request id


class SampleStart(msgspec.Struct, array_like=True, gc=False):
    """What a sample does not share with the others of its request."""

    request_id: str
    group_id: str
    prompt_index: int  # in `prompts`
    sample_index: int
    attempt: int = 0
    resume_token_ids: bytes = b""  # int32
    num_scored_prompt_tokens: int = 0


class Submission(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Samples of one HTTP request on their way to a tokenizer; a request may come in several."""

    key: str
    api: str
    api_epoch: int
    prompts: list[Prompt]
    samples: list[SampleStart]
    sampling: SamplingParams
    text: TextOptions
    priority: int
    arrival_ns: int
    deadline_ns: int

    @staticmethod
    def of(submits: Sequence[Submit]) -> Submission:
        """`submits` are of one HTTP request."""
        first = submits[0]
        prompts: list[Prompt] = []
        samples = []
        for submit in submits:
            if not prompts or prompts[-1] is not submit.prompt:
                prompts.append(submit.prompt)
            samples.append(_start_of(submit, len(prompts) - 1))
        return Submission(
            first.key or first.request_id,
            first.api,
            first.api_epoch,
            prompts,
            samples,
            first.sampling,
            first.text,
            first.priority,
            first.arrival_ns,
            first.deadline_ns,
        )

    def submits(self) -> list[Submit]:
        """The samples, each by itself."""
        return [
            Submit(
                start.request_id,
                self.api,
                self.api_epoch,
                start.attempt,
                self.prompts[start.prompt_index],
                _of_sample(self.sampling, start.sample_index),
                self.text,
                start.resume_token_ids,
                start.num_scored_prompt_tokens,
                start.group_id,
                self.priority,
                self.arrival_ns,
                self.deadline_ns,
                self.key,
            )
            for start in self.samples
        ]


class Abort(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Forget a sample or a call: its client left, its deadline passed, or the tokenizer found a stop string."""

    request_id: str  # or the call id
    attempt: int  # attempts up to this one
    reason: str = "abort"  # "abort" | "stop" | "timeout"


class Tokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    prompt: Prompt
    returns_tokens: bool = False  # the bytes of each token as well


class Detokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    token_ids: bytes  # int32


# ------------------------------------------------------------------------------------------------ tokenizer -> scheduler


class Request(msgspec.Struct, gc=False):
    """A tokenized sample, ready to be scheduled."""

    request_id: str
    api: str
    api_epoch: int
    tokenizer: str
    attempt: int
    prompt_token_ids: bytes  # int32
    resume_token_ids: bytes  # int32
    sampling: SamplingParams
    num_scored_prompt_tokens: int = 0
    group_id: str = ""
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int = 0


class TokenizedPrompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32
    max_tokens: int  # what its samples may have


class Requests(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Samples of one HTTP request on their way to the scheduler."""

    api: str
    api_epoch: int
    tokenizer: str
    prompts: list[TokenizedPrompt]
    samples: list[SampleStart]
    sampling: SamplingParams
    priority: int
    arrival_ns: int
    deadline_ns: int

    @staticmethod
    def of(requests: Sequence[Request]) -> Requests:
        """`requests` are of one HTTP request."""
        first = requests[0]
        prompts: list[TokenizedPrompt] = []
        samples = []
        for request in requests:
            prompt = TokenizedPrompt(request.prompt_token_ids, request.sampling.max_tokens)
            if not prompts or prompts[-1] != prompt:
                prompts.append(prompt)
            samples.append(_start_of(request, len(prompts) - 1))
        return Requests(
            first.api,
            first.api_epoch,
            first.tokenizer,
            prompts,
            samples,
            first.sampling,
            first.priority,
            first.arrival_ns,
            first.deadline_ns,
        )

    def requests(self) -> list[Request]:
        """The samples, each by itself."""
        return [
            Request(
                start.request_id,
                self.api,
                self.api_epoch,
                self.tokenizer,
                start.attempt,
                self.prompts[start.prompt_index].token_ids,
                start.resume_token_ids,
                _of_sample(self.sampling, start.sample_index, self.prompts[start.prompt_index].max_tokens),
                start.num_scored_prompt_tokens,
                start.group_id,
                self.priority,
                self.arrival_ns,
                self.deadline_ns,
            )
            for start in self.samples
        ]


def _start_of(sample: Submit | Request, prompt_index: int) -> SampleStart:
    return SampleStart(
        sample.request_id,
        sample.group_id,
        prompt_index,
        sample.sampling.sample_index,
        sample.attempt,
        sample.resume_token_ids,
        sample.num_scored_prompt_tokens,
    )


def _of_sample(shared: SamplingParams, sample_index: int, max_tokens: int | None = None) -> SamplingParams:
    max_tokens = shared.max_tokens if max_tokens is None else max_tokens
    if (sample_index, max_tokens) == (shared.sample_index, shared.max_tokens):
        return shared
    return msgspec.structs.replace(shared, sample_index=sample_index, max_tokens=max_tokens)


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
    logprobs: list[TokenLogprobs] = []  # one per token; all 0 where the sample wants none
    prompt_logprobs: list[TokenLogprobs] = []  # of some more tokens of the prompt after its first, in order, each once


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


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Tokens and the text they released (text held back for half characters or possible stop strings comes later)."""

    request_id: str
    attempt: int
    token_ids: list[int]
    text: str
    finish_reason: str = ""  # "" | "stop" | "length" | "abort" | "timeout"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[DecodedLogprobs] = []  # with each token; token bytes only where log-probabilities were asked for
    prompt_token_ids: bytes = b""  # int32, in the first Delta where asked for
    prompt_logprobs: list[DecodedLogprobs] = []  # of some more prompt tokens, in order, each once
    first_prompt_token: bytes = b""  # which has no log-probability; in the first Delta where those of the prompt are wanted


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
