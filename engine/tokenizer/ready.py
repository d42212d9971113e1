"""Sequences that are ready for a scheduler, as the parts of a `Request`.

Built by the tokenizer's loop from a helper's result. The shared part and each prompt are encoded here once, for all messages to
the scheduler that carry them.
"""

from __future__ import annotations

import msgspec

from engine.messages import (
    Prompt,
    Request,
    SamplingParams,
    SequencePart,
    SharedPart,
    TextOptions,
    TokenizedPrompt,
    encoded_part,
)
from engine.messages.request import with_prompts


class ReadyRequest(msgspec.Struct, frozen=True, eq=False):
    """Part of a request that its sequences share."""

    asked: SharedPart  # as the api process sent it
    shared: SharedPart  # as sent to the scheduler: with resolved sampling parameters and without text options
    encoded: SharedPart
    num_bytes: int

    @staticmethod
    def of(asked: SharedPart, sampling: SamplingParams) -> ReadyRequest:
        shared = msgspec.structs.replace(asked, sampling=sampling, text=TextOptions())
        return ReadyRequest(asked, shared, *encoded_part(shared))


class ReadyPrompt(msgspec.Struct, frozen=True, eq=False):
    asked: Prompt  # as the api process sent it
    tokenized: TokenizedPrompt
    encoded: TokenizedPrompt
    num_bytes: int

    @staticmethod
    def of(asked: Prompt, tokenized: TokenizedPrompt) -> ReadyPrompt:
        return ReadyPrompt(asked, tokenized, *encoded_part(tokenized))


class ReadySequence(msgspec.Struct, frozen=True, eq=False):
    request: ReadyRequest
    prompt: ReadyPrompt
    own: SequencePart

    @property
    def key(self) -> str:
        """Key of the HTTP request."""
        return self.request.shared.key

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.tokenized.token_ids) // 4


def request_of(tokenizer: str, sequences: list[ReadySequence]) -> Request:
    """Return the message with sequences of one HTTP request."""
    carried = with_prompts((sequence.own, sequence.prompt.encoded) for sequence in sequences)
    return Request(tokenizer, sequences[0].request.encoded, *carried)
