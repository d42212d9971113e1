"""Repetitive answers are detected by the definition, however their tokens are grouped."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import RepetitionLimits
from engine.tokenizer.repetition import Repetition

LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(2, 4)).map(
    lambda drawn: RepetitionLimits(drawn[0] + drawn[1], drawn[0], drawn[2])
)


def end_of(token_ids: list[int], limits: RepetitionLimits, min_tokens: int) -> int:
    """Return the number of tokens at which the last ones are a pattern, repeated `min_count` times, by the definition."""
    for end in range(max(min_tokens, 1), len(token_ids) + 1):
        for size in range(limits.min_pattern_size, limits.max_pattern_size + 1):
            num_last = size * limits.min_count
            if num_last <= end and token_ids[end - num_last : end] == token_ids[end - size : end] * limits.min_count:
                return end
    return len(token_ids)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=40), LIMITS, st.integers(0, 20), st.lists(st.integers(0, 40), max_size=5))
def test_the_definition(token_ids: list[int], limits: RepetitionLimits, min_tokens: int, cuts: list[int]) -> None:
    repetition = Repetition(limits, min_tokens)
    bounds = sorted({0, len(token_ids), *(min(cut, len(token_ids)) for cut in cuts)})
    counted = [repetition.push(token_ids[start:end]) for start, end in itertools.pairwise(bounds)]
    assert sum(counted) == end_of(token_ids, limits, min_tokens)
    assert repetition.is_found or sum(counted) == len(token_ids)
