"""From logits to tokens and log-probabilities: the native sampler (ops/cpu/native/sampling.h) over the runner's slots.

Called by the runner for rows that sample and for prompt rows with log-probabilities. Order of the operations:

    logit_bias, allowed_token_ids, bad_words, min_tokens, penalties, dry    change the logits (also for greedy)
    the mask of structured output                                           leaves some tokens; applied alone if none is left
    temperature, top_n_sigma, min_p, top_k, top_p, typical_p, xtc           choose among them
    inverse of the cumulative distribution, in token id order               with a number of (seed, position, sample index)

Ties go to the lower token id; if no logit is finite, or one is NaN, the first of the largest is taken. The result of a row is a
function of its logits, its own tokens and its parameters: weights are float32, summed in float64 over fixed blocks of the
vocabulary, independent of other rows and of the number of threads. tests/workers/sampling/reference_sampler.py has the same
definitions in plain numpy.

Log-probabilities and ranks are those of the raw logits, before any operation; they are computed on request.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ops import _cpu
from workers.sampling.slot_sampling import SlotSampling


class Scores(msgspec.Struct, frozen=True):
    """A token per row, with log-probabilities; these are 0 in rows that did not request them."""

    token_ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n], from 1
    top_token_ids: np.ndarray  # int32 [n, num_top], best first; as many per row as it requested
    top_logprobs: np.ndarray  # float32 [n, num_top]

    @staticmethod
    def of(token_ids: np.ndarray, num_top: int) -> Scores:
        num_rows = len(token_ids)
        return Scores(
            token_ids,
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.int32),
            np.zeros((num_rows, num_top), np.int32),
            np.zeros((num_rows, num_top), np.float32),
        )

    def put(self, part: slice | np.ndarray, scores: Scores) -> None:
        """Store the scores of some of the rows."""
        self.token_ids[part], self.logprobs[part], self.ranks[part] = scores.token_ids, scores.logprobs, scores.ranks
        num_top = scores.top_token_ids.shape[1]
        self.top_token_ids[part, :num_top], self.top_logprobs[part, :num_top] = scores.top_token_ids, scores.top_logprobs

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        return (
            _cpu.address(self.token_ids),
            _cpu.address(self.logprobs),
            _cpu.address(self.ranks),
            self.top_token_ids.shape[1],
            _cpu.address(self.top_token_ids),
            _cpu.address(self.top_logprobs),
        )


def num_top(logits: np.ndarray, sampling: SlotSampling, slot_ids: np.ndarray) -> int:
    """Return the largest number of top tokens that a row requests."""
    return min(max(int(sampling.records["num_logprobs"][slot_ids].max(initial=0)), 0), int(logits.shape[1]))


def sample(logits: np.ndarray, sampling: SlotSampling, slot_ids: np.ndarray, positions: np.ndarray) -> Scores:
    """Sample the token at `positions[i]` of slot `slot_ids[i]` (both int32 [n]) from row i of `logits` (float32 [n, vocab])."""
    scores = Scores.of(np.empty(len(slot_ids), np.int32), num_top(logits, sampling, slot_ids))
    slots = sampling.slots
    slot_ids, positions = np.ascontiguousarray(slot_ids, np.int32), np.ascontiguousarray(positions, np.int32)
    _cpu.sample(
        _address_of(logits),
        logits.shape[1],
        len(slot_ids),
        *scores.addresses(),
        _cpu.address(sampling.records),
        _cpu.address(slots.token_ids),
        slots.token_ids.shape[1],
        _cpu.address(slots.num_prompt_tokens),
        _cpu.address(slot_ids),
        _cpu.address(positions),
    )
    return scores


def score(logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> Scores:
    """Return log-probability and rank of `token_ids[i]` (int32 [n]) in row i of `logits` (float32 [n, vocab]), and its
    `num_top` best tokens."""
    assert token_ids.size == 0 or 0 <= token_ids.min() <= token_ids.max() < logits.shape[1], "a token beyond the vocabulary"
    scores = Scores.of(np.ascontiguousarray(token_ids, np.int32), min(num_top, logits.shape[1]))
    _cpu.score(_address_of(logits), logits.shape[1], len(token_ids), *scores.addresses())
    return scores


def _address_of(logits: np.ndarray) -> int:
    assert logits.dtype == np.float32, logits.dtype
    assert logits.flags.c_contiguous
    return _cpu.address(logits)
