"""Log-probabilities as vLLM arranges them: for each position a dictionary by token id."""

from __future__ import annotations

from typing import Any

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """`rank` is 1 for the likeliest token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


def logprobs_of(rows: Any) -> Any:
    """Convert the rows of an answer; None for the first token of a prompt, which has no log-probability."""
    return msgspec.convert(rows, PromptLogprobs, strict=False)


def cumulative(rows: Logprobs, token_ids: list[int]) -> float:
    """Return the sum over the tokens themselves."""
    return sum(row[token_id].logprob for row, token_id in zip(rows, token_ids, strict=True))
