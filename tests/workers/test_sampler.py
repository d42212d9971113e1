"""Sampling: each parameter against its definition, and each row independent of its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.messages import SamplingParams
from workers import sampler
from workers.philox import uniform
from workers.sampler import Draw
from workers.sampling_state import SlotSampling

VOCAB = 50


def draw_of(prompt: list[int] | None = None, outputs: list[int] | None = None, **params: Any) -> Draw:
    prompt, outputs = [1, 2] if prompt is None else prompt, outputs or []
    sampling = SlotSampling.of(SamplingParams(**params), VOCAB)
    return Draw(sampling, np.array(prompt + outputs, np.int32), len(prompt))


def logits_of(seed: int = 0, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, VOCAB), np.float32) * 3


def support(logits: np.ndarray, **params: Any) -> set[int]:
    """The tokens that 400 positions of one request draw."""
    found = set()
    for length in range(400):
        draw = draw_of(prompt=[1] * (length + 1), **params)
        found.add(int(sampler.sample(logits, [draw])[0]))
    return found


def best_ids(logits: np.ndarray, count: int) -> list[int]:
    return sorted(range(VOCAB), key=lambda token_id: (-logits[0, token_id], token_id))[:count]


class TestGreedy:
    def test_takes_the_best_and_of_equals_the_first(self) -> None:
        logits = np.zeros((2, VOCAB), np.float32)
        logits[0, [9, 4, 30]] = 2.0
        assert sampler.sample(logits, [draw_of(temperature=0.0)] * 2).tolist() == [4, 0]

    def test_takes_the_processed_logits(self) -> None:
        logits = logits_of()
        first, second = best_ids(logits, 2)
        assert sampler.sample(logits, [draw_of(temperature=0.0, logit_bias={first: -100.0})]).tolist() == [second]
        assert logits[0].argmax() == first, "the logits themselves are not written"


class TestProcessing:
    def test_allowed_token_ids(self) -> None:
        found = sampler.process(logits_of()[0], draw_of(allowed_token_ids=[3, 7], logit_bias={7: 2.0}))
        assert np.flatnonzero(np.isfinite(found)).tolist() == [3, 7]
        np.testing.assert_allclose(found[7], logits_of()[0, 7] + 2)

    @pytest.mark.parametrize(
        ("outputs", "banned"), [([], [20]), ([5], [20]), ([5, 6], [20, 21]), ([6, 5], [20]), ([5, 6, 7], [20])]
    )
    def test_bad_words(self, outputs: list[int], banned: list[int]) -> None:
        """A word's last token is banned where its others were just put out; the prompt does not count."""
        draw = draw_of(prompt=[5, 6], outputs=outputs, bad_words_token_ids=[[20], [5, 6, 21]])
        found = sampler.process(logits_of()[0], draw)
        assert np.flatnonzero(np.isinf(found)).tolist() == banned

    @pytest.mark.parametrize("num_outputs", [0, 2, 3])
    def test_min_tokens(self, num_outputs: int) -> None:
        draw = draw_of(outputs=[9] * num_outputs, min_tokens=3, stop_token_ids=[4, 5])
        banned = np.flatnonzero(np.isinf(sampler.process(logits_of()[0], draw))).tolist()
        assert banned == ([4, 5] if num_outputs < 3 else [])

    def test_penalties(self) -> None:
        """Repetition over prompt and outputs; presence and frequency over outputs."""
        logits = np.linspace(-5, 5, VOCAB, dtype=np.float32)
        draw = draw_of(
            prompt=[3, 40], outputs=[3, 41, 41], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
        )
        expected = logits.astype(np.float64)
        expected[[3]] *= 2
        expected[[40, 41]] /= 2
        expected[3] -= 0.5 + 0.25
        expected[41] -= 0.5 + 0.5
        np.testing.assert_allclose(sampler.process(logits, draw), expected, rtol=1e-6)


class TestTruncation:
    def test_top_k(self) -> None:
        logits = logits_of()
        assert support(logits, temperature=3.0, top_k=4) == set(best_ids(logits, 4))
        assert support(logits, temperature=3.0, top_k=1) == set(best_ids(logits, 1))

    def test_top_k_of_equals_takes_the_lowest_ids(self) -> None:
        assert support(np.zeros((1, VOCAB), np.float32), top_k=3) == {0, 1, 2}

    def test_top_p(self) -> None:
        logits = logits_of(2)
        weights = np.exp(logits[0].astype(np.float64))
        weights /= weights.sum()
        order = best_ids(logits, VOCAB)
        count = int(np.searchsorted(np.cumsum(weights[order]), 0.7)) + 1
        found = support(logits, top_p=0.7)
        assert found <= set(order[:count])
        assert {token_id for token_id in order[:count] if weights[token_id] > 0.03} <= found
        assert support(logits, top_p=0.0) == {order[0]}

    def test_min_p(self) -> None:
        logits = logits_of(3)
        weights = np.exp((logits[0] - logits[0].max()).astype(np.float64) / 2.0)
        assert support(logits, temperature=2.0, min_p=0.3) == set(np.flatnonzero(weights >= 0.3).tolist())

    def test_top_p_is_of_what_top_k_leaves(self) -> None:
        """Two equal tokens of three: each is half, so that half suffices for one."""
        logits = np.full((1, VOCAB), -9.0, np.float32)
        logits[0, [10, 20, 30]] = 1.0
        assert support(logits, top_k=2, top_p=0.5) == {10}
        assert support(logits, top_k=2, top_p=0.51) == {10, 20}


def test_draws_follow_the_distribution() -> None:
    logits = logits_of(5) / 3
    weights = np.exp(logits[0].astype(np.float64) / 0.8)
    expected = weights / weights.sum() * 4000
    draws = [draw_of(prompt=[0] * length, temperature=0.8, seed=11) for length in range(1, 4001)]
    counts = np.bincount(sampler.sample(np.repeat(logits, 4000, axis=0), draws), minlength=VOCAB)
    assert ((counts - expected) ** 2 / expected).sum() < 95  # chi square, 49 degrees of freedom


def test_inverse_of_the_cumulative_distribution_in_token_order() -> None:
    logits = logits_of(6)
    sums = np.cumsum(np.exp(logits[0].astype(np.float64) - logits[0].max()))
    for length in (1, 2, 3, 77):
        draw = draw_of(prompt=[0] * length, seed=3, sample_index=2)
        expected = np.searchsorted(sums, uniform(3, length, 2) * sums[-1], side="right")
        assert sampler.sample(logits, [draw])[0] == expected


@pytest.mark.parametrize("bad", [np.full(VOCAB, -np.inf), np.full(VOCAB, np.nan), np.full(VOCAB, np.inf)])
def test_no_distribution(bad: np.ndarray) -> None:
    """Broken weights or everything masked: some token comes out, nothing is raised."""
    token_ids = sampler.sample(bad[None].astype(np.float32), [draw_of(temperature=1.0)])
    assert 0 <= token_ids[0] < VOCAB


def test_rows_do_not_depend_on_their_batch() -> None:
    rows = 64
    logits = logits_of(8, rows)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 6},
        {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 1.0, "logit_bias": {3: 4.0}, "seed": 7},
    ]
    draws = [draw_of(prompt=[1] * (row + 1), **kinds[row % 4]) for row in range(rows)]
    whole, norms = sampler.sample(logits, draws), sampler.normalizers(logits)
    logprobs = sampler.token_logprobs(logits, whole, norms, True)
    for begin, end in ((0, 1), (5, 6), (63, 64), (3, 20), (17, 64)):
        part = np.ascontiguousarray(logits[begin:end])
        np.testing.assert_array_equal(sampler.sample(part, draws[begin:end]), whole[begin:end])
        np.testing.assert_array_equal(sampler.normalizers(part), norms[begin:end])
        found = sampler.token_logprobs(part, whole[begin:end], norms[begin:end], True)
        np.testing.assert_array_equal(found.logprobs, logprobs.logprobs[begin:end])
        np.testing.assert_array_equal(found.ranks, logprobs.ranks[begin:end])


class TestLogprobs:
    def test_against_float64(self) -> None:
        logits = logits_of(9, 3)
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
        norms = sampler.normalizers(logits)
        token_ids = np.array([4, 0, 49], np.int32)
        found = sampler.token_logprobs(logits, token_ids, norms, True)
        np.testing.assert_allclose(found.logprobs, exact[[0, 1, 2], token_ids], atol=1e-5)
        ranks = [1 + int((logits[row] > logits[row, token]).sum()) for row, token in enumerate(token_ids)]
        assert found.ranks.tolist() == ranks
        assert sampler.token_logprobs(logits, token_ids, norms, False).ranks.tolist() == [0, 0, 0]
        ids, values = sampler.top_logprobs(logits[1], norms[1], 5)
        assert ids.tolist() == best_ids(logits[1:2], 5)
        np.testing.assert_allclose(values, exact[1, ids], atol=1e-5)

    @pytest.mark.parametrize("count", [0, 1, VOCAB, VOCAB + 10])
    def test_any_number_of_best(self, count: int) -> None:
        ids, values = sampler.top_logprobs(logits_of()[0], np.float32(0), count)
        assert len(ids) == len(values) == min(count, VOCAB)

    def test_broken_logits_have_best_ones_all_the_same(self) -> None:
        assert len(sampler.best(np.full(VOCAB, np.nan, np.float32), 4)) == 4
        partly = np.array([np.nan, 1.0, np.nan, 2.0], np.float32)
        assert sampler.best(partly, 4).tolist() == [3, 1, 0, 2]

    def test_equal_best_are_ordered_by_id(self) -> None:
        logits = np.zeros(VOCAB, np.float32)
        logits[30] = 1
        assert sampler.best(logits, 4).tolist() == [30, 0, 1, 2]
