"""Requests for tests, built from keywords of any part and read sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import (
    Prompt,
    Request,
    SamplingParams,
    SequencePart,
    SequenceRequest,
    SharedPart,
    Submit,
    TextOptions,
    TextPrompt,
    TokenizedPrompt,
)


def _taken(type_: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in type_.__struct_fields__ if name in fields}


def parts_of(request_id: str, fields: dict[str, Any]) -> tuple[SharedPart, SequencePart]:
    """Take the fields of both parts, of the sampling parameters and of the text options out of `fields`."""
    own = SequencePart(request_id, **_taken(SequencePart, fields))
    sampling = fields.pop("sampling", None) or SamplingParams(**_taken(SamplingParams, fields))
    text = fields.pop("text", None) or TextOptions(**_taken(TextOptions, fields))
    named = {"key": own.group_id or request_id, "api": "api0", "api_epoch": 1} | _taken(SharedPart, fields)
    return SharedPart(sampling=sampling, text=text, **named), own


def submit_of(prompt: Prompt | str, request_id: str = "r", **fields: Any) -> Submit:
    """Return one sequence, as an api process submits it."""
    shared, own = parts_of(request_id, fields)
    assert not fields, fields
    return Submit(shared, [TextPrompt(prompt) if isinstance(prompt, str) else prompt], [own])


def together(submits: Sequence[Submit]) -> Submit:
    """Return one message with the sequences of one request."""
    prompts: list[Prompt] = []
    sequences = []
    for submit in submits:
        if submit.prompts[0] not in prompts:
            prompts += submit.prompts
        (own,) = submit.sequences
        sequences.append(msgspec.structs.replace(own, prompt_index=prompts.index(submit.prompts[0])))
    return Submit(submits[0].shared, prompts, sequences)


def sequence_request(token_ids: bytes, request_id: str = "r", **fields: Any) -> SequenceRequest:
    """Return one sequence, as the scheduler holds it."""
    tokenizer = fields.pop("tokenizer", "tokenizer0")
    given = _taken(
        TokenizedPrompt, {name: value for name, value in fields.items() if name not in ("max_tokens", "is_thinking")}
    )
    for name in given:
        del fields[name]
    shared, own = parts_of(request_id, fields)
    assert not fields, fields
    prompt = TokenizedPrompt(token_ids, shared.sampling.max_tokens, is_thinking=shared.sampling.is_thinking, **given)
    return Request(tokenizer, shared, [prompt], [own]).per_sequence()[0]


def request_message(request: SequenceRequest) -> Request:
    """Return the message that carries it."""
    return Request(request.tokenizer, request.shared, [request.prompt], [msgspec.structs.replace(request.own, prompt_index=0)])


class Submitted:
    """A sequence as an api process submitted it, with the fields of all parts."""

    def __init__(self, shared: SharedPart, prompt: Prompt, own: SequencePart) -> None:
        self.shared = shared
        self.prompt = prompt
        self.own = own
        self.sampling = msgspec.structs.replace(shared.sampling, sample_index=own.sample_index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own if name in SequencePart.__struct_fields__ else self.shared, name)


def submitted(message: Submit) -> list[Submitted]:
    return [Submitted(message.shared, message.prompts[own.prompt_index], own) for own in message.sequences]


def with_shared(request: SequenceRequest, **fields: Any) -> SequenceRequest:
    """Return the request with other fields in its shared part."""
    return msgspec.structs.replace(request, shared=msgspec.structs.replace(request.shared, **fields))


def with_own(request: SequenceRequest, **fields: Any) -> SequenceRequest:
    """Return the request with other fields in the sequence's part."""
    return msgspec.structs.replace(request, own=msgspec.structs.replace(request.own, **fields))
