"""A request on its way to the scheduler.

api -> tokenizer          Submit, Abort, Tokenize, Detokenize
tokenizer -> scheduler    Request, Abort

`Submit` and `Request` carry sequences of one HTTP request: the part that all share (`SharedPart`), the prompts, and a part for
each sequence (`SequencePart`). A request may take several messages. Senders encode the shared part and each prompt once
(`encoded_part` in `engine/messages/__init__.py`), for all messages that carry them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from engine.messages.media import MediaItem, MediaUnit
from engine.messages.sampling import Prompt, PromptOptions, SamplingParams, TextOptions

MESSAGE_BYTES = 64  # bound on a `Submit` or `Request` in a record, besides its parts
_OWN_BYTES = 64  # bound on a sequence in a record, besides its ids and tokens

P = TypeVar("P")


class SharedPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Part of an HTTP request that all its sequences share, from the api process to the scheduler."""

    key: str  # of the HTTP request, unique in the run: messages that wait for a ring wait in one queue per key
    api: str  # actor that gets the answers
    api_epoch: int
    sampling: SamplingParams
    text: TextOptions  # left empty on the way to the scheduler
    priority: int = 0  # lower runs first
    arrival_ns: int = 0  # CLOCK_MONOTONIC
    deadline_ns: int = 0  # CLOCK_MONOTONIC, 0: none
    pinned_replica: int = -1  # replica requested by the client; -1: any
    media: list[MediaItem] = []  # of its single prompt, in order
    mask_bounds: bytes = b""  # int32 [prompt tokens, 2]: first and last key that each sees; empty: causal
    options: PromptOptions = PromptOptions()
    source: str = ""  # the user that sent it, if known: sources take turns where work is slow


class SequencePart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Part of an HTTP request that belongs to one sequence. Sent again with `attempt + 1` after a crash."""

    request_id: str  # unique in the run
    group_id: str = ""  # shared by the sequences of one prompt
    prompt_index: int = 0  # in `prompts`
    sample_index: int = 0  # among the sequences of the prompt
    attempt: int = 0
    resume_token_ids: bytes = b""  # int32, tokens that the api process already has
    num_scored_prompt_tokens: int = 0  # log-probabilities that the api process already has
    replica: int = -1  # of the previous attempt; -1: none, or not known yet to the api process
    weight_version: int = 0  # that computed the last of the tokens; 0: there are none

    @property
    def max_bytes(self) -> int:
        """Bound on the bytes that the sequence adds to a record, without the shared parts."""
        return _OWN_BYTES + len(self.request_id) + len(self.group_id) + len(self.resume_token_ids)


def with_prompts(sequences: Iterable[tuple[SequencePart, P]]) -> tuple[list[P], list[SequencePart]]:
    """Return the `prompts` and `sequences` of a message from sequences with their prompts; an object is carried once."""
    prompts: list[P] = []
    indexes: dict[int, int] = {}  # by the identity of a prompt, which may be encoded
    parts = []
    for own, prompt in sequences:
        index = indexes.setdefault(id(prompt), len(prompts))
        if index == len(prompts):
            prompts.append(prompt)
        parts.append(own if own.prompt_index == index else msgspec.structs.replace(own, prompt_index=index))
    return prompts, parts


# ------------------------------------------------------------------------------------------------------ api -> tokenizer


class Submit(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Sequences of one HTTP request on their way to a tokenizer."""

    shared: SharedPart
    prompts: list[Prompt]
    sequences: list[SequencePart]


class Abort(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Forget a sequence or a call: the client disconnected, its deadline passed, or the tokenizer found a stop string."""

    request_id: str  # or the call id
    attempt: int  # attempts up to this one
    reason: str = "abort"  # "abort" | "stop" | "timeout"


class Tokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    prompt: Prompt
    returns_tokens: bool = False  # the bytes of each token as well
    media: list[MediaItem] = []
    truncate_prompt_tokens: int = 0  # as in `TextOptions`, with room for an answer of `max_tokens`
    max_tokens: int = -1
    source: str = ""
    attempt: int = 0  # 1 and up: sent before to a tokenizer that died


class Detokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    token_ids: bytes  # int32
    source: str = ""
    attempt: int = 0  # as in `Tokenize`


# ------------------------------------------------------------------------------------------------ tokenizer -> scheduler


class TokenizedPrompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32
    max_tokens: int  # limit for each of its sequences
    units: tuple[MediaUnit, ...] = ()  # in the prompt's order
    is_thinking: bool = False  # the prompt ends inside reasoning
    second_start: int = 0  # first token of the second of two texts that the model distinguishes; 0: there is one text


class Request(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Tokenized sequences of one HTTP request on their way to the scheduler."""

    tokenizer: str
    shared: SharedPart  # with resolved sampling parameters, except those that differ per prompt or sequence
    prompts: list[TokenizedPrompt]
    sequences: list[SequencePart]

    def per_sequence(self) -> list[SequenceRequest]:
        """Return each sequence by itself, in order."""
        return [
            SequenceRequest(self.tokenizer, self.shared, self.prompts[own.prompt_index], own, self._sampling(own))
            for own in self.sequences
        ]

    def _sampling(self, own: SequencePart) -> SamplingParams:
        shared, prompt = self.shared.sampling, self.prompts[own.prompt_index]
        wanted = (own.sample_index, prompt.max_tokens, prompt.is_thinking)
        if wanted == (shared.sample_index, shared.max_tokens, shared.is_thinking):
            return shared
        sample_index, max_tokens, is_thinking = wanted
        return msgspec.structs.replace(shared, sample_index=sample_index, max_tokens=max_tokens, is_thinking=is_thinking)


class SequenceRequest(msgspec.Struct, frozen=True, gc=False):
    """One sequence of a `Request` in the scheduler, with the parts of the message."""

    tokenizer: str
    shared: SharedPart
    prompt: TokenizedPrompt
    own: SequencePart
    sampling: SamplingParams  # of this sequence
