"""Beam search in the client, as in vLLM's class: each step requests the likeliest next tokens of every beam.

The engine's prefix cache holds what beams have in common. Used by `llm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tokamak.logprobs import Logprobs, logprobs_of

Ask = Callable[[dict[str, Any]], Any]  # a request to /v1/completions


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Beam search parameters with vLLM's names. `temperature` has no effect: log-probabilities are the model's own."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


class BeamSearchSequence(msgspec.Struct):
    """Beam: the tokens of the prompt and the answer; `logprobs` has an entry for each token of the answer."""

    tokens: list[int]
    logprobs: Logprobs = []
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop": an end token, else "length"
    stop_reason: int | str | None = None  # the end token
    lora_request: Any = None


class BeamSearchOutput(msgspec.Struct):
    """Best beams of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def search(
    ask: Ask, prompt: list[int], params: BeamSearchParams, end_token_ids: set[int], max_model_len: int
) -> BeamSearchOutput:
    """Search. `prompt`: token ids. ValueError if the engine refuses it."""
    beams, ended = [BeamSearchSequence(prompt)], list[BeamSearchSequence]()

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in end_token_ids)
        return beam.cum_logprob / max(1, length) ** params.length_penalty

    for _ in range(min(params.max_tokens, max(1, max_model_len - len(prompt)))):
        body = {
            "prompt": [beam.tokens for beam in beams],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 2 * params.beam_width,
            "logprobs_by_id": True,
            "return_token_ids": True,
        }
        grown: list[BeamSearchSequence] = []
        for beam, choice in zip(beams, ask(body)["choices"], strict=True):
            if choice["finish_reason"] == "stop":
                end_token_ids.update(choice["token_ids"])
            (row,) = logprobs_of(choice["logprobs_by_id"])
            for token_id, entry in row.items():
                made = BeamSearchSequence(
                    [*beam.tokens, token_id],
                    [*beam.logprobs, row],
                    beam.cum_logprob + entry.logprob,
                    lora_request=beam.lora_request,
                )
                if token_id not in end_token_ids or params.ignore_eos:
                    grown.append(made)
                    continue
                made.finish_reason, made.stop_reason = "stop", token_id
                if not params.include_stop_str_in_output:
                    made.tokens = beam.tokens
                ended.append(made)
        beams = sorted(grown, key=score, reverse=True)[: params.beam_width]
        if not beams:
            break
    for beam in beams:
        beam.finish_reason = "length"
    return BeamSearchOutput(sorted([*ended, *beams], key=score, reverse=True)[: params.beam_width])
