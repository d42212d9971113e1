"""`--log-requests`: a line when the engine accepts a request, and one when it was answered. Ids, lengths and parameters, never
text: values from a client are only numbers.

Created in the api process if enabled; `RequestContext.opened` and `app.App` call it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from api.client.generation import Generation
from engine.messages import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokensPrompt

_HIDDEN = frozenset({"sample_index", "grammar", "pooling"})
_USUAL = msgspec.structs.asdict(SamplingParams())


class RequestLog:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def on_opened(self, request_id: str, generation: Generation, prompts: Sequence[Prompt]) -> None:
        """Log that the sequences of a request are open."""
        shared = generation.shared
        fields: dict[str, Any] = {
            "id": request_id,
            "samples": len(generation.sequences),
            **_lengths(prompts),
            **parameters_of(shared.sampling),
            "stop_strings": len(shared.text.stop),
            "has_form": shared.text.is_bound,
            "media": len(shared.media),
            "priority": shared.priority,
        }
        self._log.info("request taken", extra={"fields": {name: value for name, value in fields.items() if value}})

    def on_answered(
        self, request_id: str, method: str, path: str, status: int, duration_ns: int, generation: Generation | None
    ) -> None:
        """Log that a request is over. `status` 0: the client disconnected before the answer began."""
        fields: dict[str, Any] = {
            "id": request_id,
            "method": method,
            "path": path[:256],
            "status": status,
            "seconds": round(duration_ns / 1e9, 6),
        }
        if generation is not None:
            fields |= figures_of(generation)
        self._log.info("request answered", extra={"fields": fields})


def parameters_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults; lists and mappings as their lengths."""
    given = {name: value for name, value in msgspec.structs.asdict(sampling).items() if name not in _HIDDEN}
    return {
        name: len(value) if isinstance(value, (list, dict, bytes, str)) else value
        for name, value in given.items()
        if value != _USUAL[name]
    }


def figures_of(generation: Generation) -> dict[str, Any]:
    """Return the numbers of an answer: its tokens, finish reasons and times."""
    sequences = generation.sequences
    firsts = [sequence.first_token_ns - generation.shared.arrival_ns for sequence in sequences if sequence.first_token_ns]
    return {
        "prompt_tokens": sum(sequence.num_prompt_tokens for sequence in sequences[:: generation.sequences_per_prompt]),
        "cached_tokens": sum(sequence.num_cached_tokens for sequence in sequences[:: generation.sequences_per_prompt]),
        "generation_tokens": sum(len(sequence.delivered) for sequence in sequences),
        "finish_reason": ",".join(sorted({sequence.finish_reason or "none" for sequence in sequences})),
        "attempts": 1 + max(sequence.own.attempt for sequence in sequences),
        **({"time_to_first_token": round(min(firsts) / 1e9, 6)} if firsts else {}),
    }


def _lengths(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Return the amount of each kind of prompt."""
    tokens = sum(len(prompt.token_ids) // 4 for prompt in prompts if isinstance(prompt, TokensPrompt))
    characters = sum(len(prompt.text) for prompt in prompts if isinstance(prompt, TextPrompt))
    num_bytes = sum(len(prompt.messages) for prompt in prompts if isinstance(prompt, ChatPrompt))
    return {"prompts": len(prompts), "given_tokens": tokens, "characters": characters, "conversation_bytes": num_bytes}
