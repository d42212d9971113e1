"""A request on its way to the scheduler.

api -> tokenizer          Submission, Abort, Tokenize, Detokenize
tokenizer -> scheduler    Requests, Abort

What the samples of an HTTP request share (prompts, stop strings, bad words, sampling parameters) travels once: a `Submission`
is what the edge sends of several `Submit`s, and `Requests` what the tokenizer makes of it. `Submit` and `Request` are one
sample as each end holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages.media import MediaItem, MediaUnit
from engine.messages.sampling import Prompt, PromptOptions, SamplingParams, TextOptions

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
    pinned_replica: int = -1  # the one that the client asks for; -1: any
    replica: int = -1  # where the attempt before was; -1: there was none, or the edge has not heard
    media: list[MediaItem] = []  # in the prompt's order
    mask_bounds: bytes = b""  # int32 [prompt tokens, 2]: first and last key that each sees; empty: causal
    options: PromptOptions = PromptOptions()
    source: str = ""  # whose request it is, where that is known: what takes long is done by turns between these


class SampleStart(msgspec.Struct, array_like=True, gc=False):
    """What a sample does not share with the others of its request."""

    request_id: str
    group_id: str
    prompt_index: int  # in `prompts`
    sample_index: int
    attempt: int = 0
    resume_token_ids: bytes = b""  # int32
    num_scored_prompt_tokens: int = 0
    replica: int = -1  # of the attempt before


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
    pinned_replica: int = -1
    media: list[MediaItem] = []  # of its one prompt, where there are any
    mask_bounds: bytes = b""
    options: PromptOptions = PromptOptions()
    source: str = ""

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
            first.pinned_replica,
            first.media,
            first.mask_bounds,
            first.options,
            first.source,
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
                self.pinned_replica,
                start.replica,
                self.media,
                self.mask_bounds,
                self.options,
                self.source,
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
    media: list[MediaItem] = []
    truncate_prompt_tokens: int = 0  # as of `TextOptions`, beside an answer of `max_tokens`
    max_tokens: int = -1
    source: str = ""
    attempt: int = 0  # 1 and up: it was taken before, by a tokenizer that died


class Detokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    token_ids: bytes  # int32
    source: str = ""
    attempt: int = 0  # as of `Tokenize`


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
    media: list[MediaItem] = []
    units: tuple[MediaUnit, ...] = ()  # in the prompt's order
    mask_bounds: bytes = b""
    options: PromptOptions = PromptOptions()
    second_start: int = 0  # of a prompt of two texts, which the model tells apart: the second's first token; 0: there is none
    key: str = ""  # of the HTTP request, and whose that is: samples are begun by turns between sources, and between requests
    source: str = ""


class TokenizedPrompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32
    max_tokens: int  # what its samples may have
    units: tuple[MediaUnit, ...] = ()
    is_thinking: bool = False  # it ends inside thinking
    second_start: int = 0


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
    media: list[MediaItem] = []
    mask_bounds: bytes = b""
    options: PromptOptions = PromptOptions()
    key: str = ""
    source: str = ""

    @staticmethod
    def of(requests: Sequence[Request]) -> Requests:
        """`requests` are of one HTTP request."""
        first = requests[0]
        prompts: list[TokenizedPrompt] = []
        samples = []
        for request in requests:
            sampling = request.sampling
            prompt = TokenizedPrompt(
                request.prompt_token_ids, sampling.max_tokens, request.units, sampling.is_thinking, request.second_start
            )
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
            first.media,
            first.mask_bounds,
            first.options,
            first.key,
            first.source,
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
                _of_sample(self.sampling, start.sample_index, self.prompts[start.prompt_index]),
                start.num_scored_prompt_tokens,
                start.group_id,
                self.priority,
                self.arrival_ns,
                self.deadline_ns,
                self.media,
                self.prompts[start.prompt_index].units,
                self.mask_bounds,
                self.options,
                self.prompts[start.prompt_index].second_start,
                self.key,
                self.source,
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
        sample.replica if isinstance(sample, Submit) else -1,
    )


def _of_sample(shared: SamplingParams, sample_index: int, prompt: TokenizedPrompt | None = None) -> SamplingParams:
    """`prompt`: once it is tokenized."""
    of_prompt = (shared.max_tokens, shared.is_thinking) if prompt is None else (prompt.max_tokens, prompt.is_thinking)
    if (sample_index, *of_prompt) == (shared.sample_index, shared.max_tokens, shared.is_thinking):
        return shared
    max_tokens, is_thinking = of_prompt
    return msgspec.structs.replace(shared, sample_index=sample_index, max_tokens=max_tokens, is_thinking=is_thinking)
