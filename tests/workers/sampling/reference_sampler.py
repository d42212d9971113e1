"""The sampler's definitions in plain numpy and float64, with sorts: the reference of the native one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.messages import SamplingParams
from ops import _cpu


@dataclass(frozen=True, slots=True)
class Draw:
    """Inputs of one row besides its logits: its tokens so far and the start of the outputs."""

    params: SamplingParams
    token_ids: np.ndarray  # int32, prompt and outputs before the drawn token
    num_prompt_tokens: int
    mask: np.ndarray | None = None  # bool [vocab], of an answer with structured output

    @property
    def output_ids(self) -> np.ndarray:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def number(self) -> float:
        return _cpu.uniform(self.params.seed, len(self.token_ids), self.params.sample_index)


def process(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Return the logits [vocab] after biases, masks and penalties; a new array."""
    params, vocab_size = draw.params, len(logits)
    result = logits.astype(np.float32)
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < vocab_size:
            result[token_id] += np.float32(bias)
    if params.allowed_token_ids:
        is_allowed = np.isin(np.arange(vocab_size), params.allowed_token_ids)
        result = np.where(is_allowed, result, np.float32(-np.inf))
    output_ids = draw.output_ids
    for word in params.bad_words_token_ids:
        prefix = word[:-1]
        if len(prefix) <= len(output_ids) and output_ids[len(output_ids) - len(prefix) :].tolist() == prefix:
            result[word[-1]] = -np.inf
    if len(output_ids) < params.min_tokens:
        result[[token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]] = -np.inf
    _penalize(result, draw)
    if params.dry_multiplier > 0:
        _discourage(result, draw)
    return result if draw.mask is None else _constrained(result, logits, draw.mask)


def _constrained(processed: np.ndarray, logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the logits that the mask leaves; the unprocessed ones where biases and penalties leave none of them."""
    for values in (processed, logits, np.zeros_like(processed)):
        result: np.ndarray = np.where(mask, values, np.float32(-np.inf))
        if (result > -np.inf).any():
            break
    return result


def _discourage(logits: np.ndarray, draw: Draw) -> None:
    """Apply DRY by its definition: for each earlier place, how many tokens up to it equal the last ones."""
    params = draw.params
    tokens = draw.token_ids.tolist()
    tokens = tokens if params.dry_last_n < 0 else tokens[len(tokens) - min(params.dry_last_n, len(tokens)) :]
    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while (
            length < place
            and tokens[place - 1 - length] == tokens[-1 - length]
            and tokens[-1 - length] not in params.dry_breaker_token_ids
        ):
            length += 1
        longest[tokens[place]] = max(longest.get(tokens[place], 0), length)
    for token_id, length in longest.items():
        if length and length >= params.dry_allowed_length and token_id not in params.dry_breaker_token_ids:
            logits[token_id] -= np.float32(params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length))


def _penalize(logits: np.ndarray, draw: Draw) -> None:
    params = draw.params
    if params.repetition_penalty != 1:
        seen = np.unique(draw.token_ids)
        values, penalty = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(draw.output_ids, return_counts=True)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32) + np.float32(params.presence_penalty)


def weights_of(logits: np.ndarray, params: SamplingParams, chance: float = 1.0) -> np.ndarray:
    """Return the weights to draw from, for a temperature above 0: float64 [vocab], the best token's is 1. `chance`: xtc's."""
    exact = logits.astype(np.float64)
    weights: np.ndarray = np.exp((exact - exact.max()) / params.temperature)
    if params.top_n_sigma > 0:
        weights[exact < exact.max() - params.top_n_sigma * exact[np.isfinite(exact)].std()] = 0.0
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0
    if 0 < params.top_k < len(weights):
        weights = _only(weights, np.argsort(-weights, kind="stable")[: params.top_k])
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        is_kept = sums - weights[order] < params.top_p * sums[-1]
        is_kept[0] = True
        weights = _only(weights, order[is_kept])
    if params.typical_p < 1:
        likely = np.flatnonzero(weights)
        chances = weights[likely] / weights.sum()
        order = likely[np.argsort(np.abs(-np.log(chances) + (chances * np.log(chances)).sum()), kind="stable")]
        num_kept = int(np.searchsorted(np.cumsum(weights[order]), params.typical_p * weights.sum(), side="right")) + 1
        weights = _only(weights, order[:num_kept])
    if chance < params.xtc_probability:
        likely = np.flatnonzero(weights >= params.xtc_threshold * weights.sum())
        if len(likely) > 1:
            least = likely[weights[likely] == weights[likely].min()][-1]
            weights[likely[likely != least]] = 0.0
    return weights


def _only(weights: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(weights)
    kept[token_ids] = weights[token_ids]
    return kept


def sample(logits: np.ndarray, draw: Draw, number: float | None = None) -> int:
    """Return the token that `number` (the draw's own by default) chooses from the logits [vocab]."""
    processed = process(logits, draw)
    if draw.params.temperature == 0 or not np.isfinite(processed.max()):
        return int(np.argmax(processed))
    chance = _cpu.uniform(draw.params.seed, len(draw.token_ids), draw.params.sample_index, 1)
    weights = weights_of(processed, draw.params, chance)
    sums = np.cumsum(weights)
    token_id = int(np.searchsorted(sums, (draw.number if number is None else number) * sums[-1], side="right"))
    return min(token_id, int(np.flatnonzero(weights)[-1]))


def best_ids(logits: np.ndarray, count: int) -> list[int]:
    """Return the `count` largest, best first, ties by the lower id; NaN counts as the least."""
    ordered = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    order = np.lexsort((np.arange(len(logits)), np.isnan(logits), -ordered))
    return [int(token_id) for token_id in order[:count]]


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    """Return float64 log-probabilities of each row [..., vocab]."""
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    result: np.ndarray = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return result
