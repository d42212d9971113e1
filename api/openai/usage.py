"""Token counts, progress and times of a request, for its answer."""

from __future__ import annotations

import time

from msgspec import UNSET

from api.client.generation import Generation
from api.schemas.responses import CompletionTokensDetails, PromptProgress, PromptTokensDetails, Timings, Usage


def usage_of(generation: Generation) -> Usage:
    """Return the usage. Each prompt counts once, and the tokens of all sequences count, including those that best_of
    dropped."""
    firsts = generation.sequences[:: generation.sequences_per_prompt]
    num_prompt_tokens = sum(sequence.num_prompt_tokens for sequence in firsts)
    num_completion_tokens = sum(len(sequence.delivered) for sequence in generation.sequences)
    num_accepted = sum(sequence.num_accepted_prediction_tokens for sequence in generation.sequences)
    num_rejected = sum(sequence.num_rejected_prediction_tokens for sequence in generation.sequences)
    num_reasoning = sum(sequence.num_reasoning_tokens for sequence in generation.sequences)
    details = (num_accepted, num_rejected, num_reasoning)
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(sum(sequence.num_cached_tokens for sequence in firsts)),
        CompletionTokensDetails(*details) if any(details) else UNSET,
    )


def progress_of(generation: Generation) -> PromptProgress:
    """Return the progress. Each prompt counts once; nothing is known of prompts that no step has reached."""
    firsts = generation.sequences[:: generation.sequences_per_prompt]
    return PromptProgress(
        sum(sequence.num_prompt_tokens for sequence in firsts),
        sum(sequence.num_cached_tokens for sequence in firsts),
        sum(sequence.num_computed_tokens for sequence in firsts),
        (time.monotonic_ns() - generation.shared.arrival_ns) // 1_000_000,
    )


def timings_of(generation: Generation) -> Timings:
    """Return the times of a generation so far."""
    firsts = generation.sequences[:: generation.sequences_per_prompt]
    num_cached = sum(sequence.num_cached_tokens for sequence in firsts)
    num_prompt = sum(sequence.num_prompt_tokens for sequence in firsts) - num_cached
    num_predicted = sum(len(sequence.delivered) for sequence in generation.sequences)
    begun = [sequence for sequence in generation.sequences if sequence.first_token_ns]
    first_ns = min((sequence.first_token_ns for sequence in begun), default=time.monotonic_ns())
    prompt_ms = (first_ns - generation.shared.arrival_ns) / 1e6
    predicted_ms = (max((sequence.last_token_ns for sequence in begun), default=first_ns) - first_ns) / 1e6
    return Timings(num_cached, num_prompt, *_rates(num_prompt, prompt_ms), num_predicted, *_rates(num_predicted, predicted_ms))


def _rates(num_tokens: int, duration_ms: float) -> tuple[float, float, float]:
    """Return the duration, the time per token, and the tokens per second; 0 instead of a division by 0."""
    per_token_ms = duration_ms / num_tokens if num_tokens else 0.0
    return duration_ms, per_token_ms, 1000 * num_tokens / duration_ms if duration_ms else 0.0
