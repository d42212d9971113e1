"""From logits to tokens and log-probabilities, row by row alike. Pure numpy on the host.

Called by the runner once a step, for the rows that sample. Each row's outcome is a function of its logits, its own tokens and
its parameters: reductions run along one contiguous row, and ties are broken by the lower token id. Order of the operations:

    logit_bias, allowed_token_ids, bad_words, min_tokens, penalties    change the logits (and what greedy takes)
    temperature, min_p, top_k, top_p                                   choose among them
    inverse of the cumulative distribution, float64, in token id order

Log-probabilities are those of the raw logits, before any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.philox import uniform
from workers.sampling_state import SlotSampling


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row needs besides its logits: its sample's tokens so far and where the outputs begin."""

    sampling: SlotSampling
    token_ids: np.ndarray  # int32, prompt and outputs before the drawn token
    num_prompt_tokens: int

    @property
    def output_ids(self) -> np.ndarray:
        return self.token_ids[self.num_prompt_tokens :]


def sample(logits: np.ndarray, draws: list[Draw]) -> np.ndarray:
    """The token of each row: float32 [n, vocab] -> int32 [n]."""
    token_ids = np.argmax(logits, axis=1).astype(np.int32)
    for row, draw in enumerate(draws):
        if draw.sampling.changes_logits:
            changed = process(logits[row], draw)
            token_ids[row] = np.argmax(changed)
        else:
            changed = logits[row]
        if draw.sampling.params.temperature > 0:
            token_ids[row] = _draw(changed, draw)
    return token_ids


def process(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """The logits [vocab] as biases, masks and penalties leave them; a new array."""
    sampling, params = draw.sampling, draw.sampling.params
    result = logits.astype(np.float32)
    result[sampling.bias_token_ids] += sampling.biases
    if params.allowed_token_ids:
        masked = np.full_like(result, -np.inf)
        masked[sampling.allowed_token_ids] = result[sampling.allowed_token_ids]
        result = masked
    output_ids = draw.output_ids
    for word in sampling.bad_words:
        prefix = word[:-1]
        if len(prefix) <= len(output_ids) and np.array_equal(output_ids[len(output_ids) - len(prefix) :], prefix):
            result[word[-1]] = -np.inf
    if len(output_ids) < params.min_tokens:
        result[sampling.stop_token_ids] = -np.inf
    _penalize(result, draw)
    return result


def _penalize(logits: np.ndarray, draw: Draw) -> None:
    """Repetition over prompt and outputs (Keskar et al. 2019), presence and frequency over the outputs (OpenAI's), in place."""
    params = draw.sampling.params
    if params.repetition_penalty != 1:
        seen = np.unique(draw.token_ids)
        values, penalty = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(draw.output_ids, return_counts=True)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32) + np.float32(params.presence_penalty)


def _draw(logits: np.ndarray, draw: Draw) -> int:
    params = draw.sampling.params
    scaled = logits.astype(np.float64)
    largest = scaled.max()
    if not np.isfinite(largest):
        return int(np.argmax(logits))  # everything is masked: there is no distribution
    weights = np.exp((scaled - largest) / params.temperature)  # the best has weight 1
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0
    if 0 < params.top_k < len(weights):
        weights = _only(weights, best(weights, params.top_k))
    if params.top_p < 1:
        candidates = np.flatnonzero(weights)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        sums = np.cumsum(weights[order])
        is_kept = sums - weights[order] < params.top_p * sums[-1]
        is_kept[0] = True
        weights = _only(weights, order[is_kept])
    sums = np.cumsum(weights)
    position = len(draw.token_ids)
    target = uniform(params.seed, position, params.sample_index) * sums[-1]
    token_id = int(np.searchsorted(sums, target, side="right"))
    return min(token_id, int(np.flatnonzero(weights)[-1]))


def _only(weights: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(weights)
    kept[token_ids] = weights[token_ids]
    return kept


def best(values: np.ndarray, count: int) -> np.ndarray:
    """Indexes of the `count` largest values, best first, ties by the lower index; NaN counts as the least."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(~(values < threshold))
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one token per row; ranks start at 1."""

    logprobs: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n]


def normalizers(logits: np.ndarray) -> np.ndarray:
    """log(sum(exp(row))) of each row, float32 [n]."""
    largest = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - largest)
    sums = np.array([row.sum() for row in exponentials], np.float32)
    return largest[:, 0] + np.log(sums)


def token_logprobs(logits: np.ndarray, token_ids: np.ndarray, norms: np.ndarray, with_ranks: bool) -> Logprobs:
    """Log-probability of `token_ids[i]` in row i, and its rank (1 + the number of better tokens); 0 without ranks."""
    chosen = np.take_along_axis(logits, token_ids[:, None].astype(np.int64), axis=1)
    ranks = 1 + np.count_nonzero(logits > chosen, axis=1) if with_ranks else np.zeros(len(token_ids))
    return Logprobs((chosen[:, 0] - norms).astype(np.float32), ranks.astype(np.int32))


def top_logprobs(logits: np.ndarray, norm: np.float32, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best tokens of a row [vocab], best first: int32 ids and float32 log-probabilities."""
    token_ids = best(logits, count)
    return token_ids.astype(np.int32), (logits[token_ids] - norm).astype(np.float32)
