"""Sampling: each parameter compared with its definition, with each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.messages import SamplingParams, SlotStart
from ops import _cpu
from tests.ops.tables import table
from tests.workers.sampling import reference_sampler
from tests.workers.sampling.reference_sampler import Draw
from tests.workers.serving import int32
from workers.engine.batch_slots import BatchSlots
from workers.sampling import sampler
from workers.sampling.sampler import Scores
from workers.sampling.slot_sampling import SlotSampling

VOCAB = 50


# `amxemulated` is left out: it samples with the code of `avx512` or `wide`
@pytest.fixture(params=[variant for variant in _cpu.variants() if variant != "amxemulated"], autouse=True)
def variant(request: pytest.FixtureRequest) -> Iterator[None]:
    with table(f"{request.param}-1"):
        yield


def draw_of(
    prompt: list[int] | None = None, outputs: list[int] | None = None, mask: np.ndarray | None = None, **params: Any
) -> Draw:
    prompt, outputs = [1, 2] if prompt is None else prompt, outputs or []
    return Draw(SamplingParams(**params), np.array(prompt + outputs, np.int32), len(prompt), mask)


def mask_of(*token_ids: int, vocab: int = VOCAB) -> np.ndarray:
    mask = np.zeros(vocab, np.bool_)
    mask[list(token_ids)] = True
    return mask


def scores_of(logits: np.ndarray, draws: list[Draw]) -> Scores:
    """Return scores, with a slot for each draw, the last first."""
    num_slots, longest = len(draws), max(len(draw.token_ids) for draw in draws)
    slots = BatchSlots(np.zeros((1, num_slots + 1, 4), np.int32), longest, logits.shape[1])
    sampling, kept_masks = SlotSampling(slots), []
    for slot, draw in enumerate(reversed(draws)):
        slots.start(SlotStart(slot, "r", int32(draw.token_ids), draw.num_prompt_tokens, draw.params, b""))
        if draw.mask is not None:  # after the one of the position before, which allows nothing
            masks = np.zeros((2, -(-logits.shape[1] // 32)), np.uint32)
            kept_masks.append(masks)
            masks[1].view(np.uint8)[: -(-logits.shape[1] // 8)] = np.packbits(draw.mask, bitorder="little")
            first = len(draw.token_ids) - 1
            for name, value in {"first_masked": first, "num_masks": 2, "masks": masks.ctypes.data}.items():
                sampling.records[name][slot] = value
    slot_ids = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
    return sampler.sample(logits, sampling, slot_ids, np.array([len(draw.token_ids) for draw in draws], np.int32))


def sampled(logits: np.ndarray, draws: list[Draw]) -> list[int]:
    found: list[int] = scores_of(logits, draws).token_ids.tolist()
    return found


def logits_of(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, vocab), np.float32) * 3


def support(logits: np.ndarray, **params: Any) -> set[int]:
    """Return the tokens that 400 positions of one request draw."""
    draws = [draw_of(prompt=[1] * (length + 1), **params) for length in range(400)]
    return set(sampled(np.repeat(logits, 400, axis=0), draws))


def best_ids(logits: np.ndarray, count: int) -> list[int]:
    return reference_sampler.best_ids(logits[0], count)


class TestGreedy:
    def test_greedy_takes_the_first_of_equal_logits(self) -> None:
        logits = np.zeros((2, VOCAB), np.float32)
        logits[0, [9, 4, 30]] = 2.0
        assert sampled(logits, [draw_of(temperature=0.0)] * 2) == [4, 0]

    def test_greedy_takes_the_processed_logits(self) -> None:
        logits = logits_of()
        before = logits.copy()
        first, second = best_ids(logits, 2)
        assert sampled(logits, [draw_of(temperature=0.0, logit_bias={first: -100.0})]) == [second]
        np.testing.assert_array_equal(logits, before)

    @pytest.mark.parametrize("vocab", [1, 7, 1023, 1024, 1025, 5000])
    def test_greedy_works_for_any_vocabulary_size(self, vocab: int) -> None:
        places = sorted({0, 1, 6, 1000, 1022, 1023, 1024, 4097, vocab - 2, vocab - 1} & set(range(vocab)))
        logits = logits_of(1, len(places), vocab)
        logits[np.arange(len(places)), places] = 50.0
        assert sampled(logits, [draw_of([0], temperature=0.0)] * len(places)) == places
        assert (
            sampled(-np.abs(logits) - 99, [draw_of([0], temperature=0.0)] * len(places))
            == np.argmin(np.abs(logits), axis=1).tolist()
        )


def finite_after(logits: np.ndarray, draw: Draw) -> list[int]:
    """Return the token ids that `draw` leaves, found by asking for each."""
    vocab = logits.shape[1]
    raised = np.repeat(logits, vocab, axis=0)
    raised[np.arange(vocab), np.arange(vocab)] = 100.0
    return [token_id for token_id, found in enumerate(sampled(raised, [draw] * vocab)) if found == token_id]


class TestProcessing:
    def test_allowed_token_ids(self) -> None:
        draw = draw_of(allowed_token_ids=[3, 7], logit_bias={7: 2.0}, temperature=0.0)
        assert finite_after(logits_of(), draw) == [3, 7]
        logits = np.zeros((1, VOCAB), np.float32)
        assert sampled(logits, [draw]) == [7]
        assert sampled(logits, [draw_of(allowed_token_ids=[VOCAB], temperature=0.0)]) == [0], "all masked"

    @pytest.mark.parametrize(
        ("outputs", "banned"), [([], [20]), ([5], [20]), ([5, 6], [20, 21]), ([6, 5], [20]), ([5, 6, 7], [20])]
    )
    def test_bad_words(self, outputs: list[int], banned: list[int]) -> None:
        """A word's last token is banned where its others were just output; the prompt does not count."""
        draw = draw_of(prompt=[5, 6], outputs=outputs, bad_words_token_ids=[[20], [5, 6, 21]], temperature=0.0)
        assert sorted(set(range(VOCAB)) - set(finite_after(logits_of(), draw))) == banned

    def test_mask_combines_with_biases_and_allowed_tokens(self) -> None:
        draw = draw_of(mask=mask_of(3, 33, 49), logit_bias={3: -20.0}, allowed_token_ids=[3, 7, 49], temperature=0.0)
        assert finite_after(logits_of(), draw) == [3, 49]
        assert sampled(logits_of(), [draw]) == [49]

    def test_mask_decides_when_no_token_is_left(self) -> None:
        logits = logits_of()
        mask = mask_of(4, 21, 40)
        best = max((4, 21, 40), key=lambda token_id: logits[0, token_id])
        for params in ({"allowed_token_ids": [5]}, {"min_tokens": 3, "stop_token_ids": [4, 21, 40]}):
            assert sampled(logits, [draw_of(mask=mask, temperature=0.0, **params)]) == [best]
            assert support(logits, mask=mask, temperature=2.0, **params) == {4, 21, 40}
        for broken in (-np.inf, np.nan):
            logits[0, [4, 21, 40]] = broken
            assert sampled(logits, [draw_of(mask=mask, temperature=0.0)]) == [4]

    def test_log_probabilities_ignore_the_mask(self) -> None:
        logits = logits_of(rows=2)
        draws = [draw_of(mask=mask_of(8), num_logprobs=3), draw_of(num_logprobs=3)]
        found = scores_of(np.repeat(logits[:1], 2, axis=0), draws)
        assert found.token_ids[0] == 8
        assert found.logprobs[0] == np.float32(reference_sampler.logprobs_of(logits[0])[8])
        np.testing.assert_array_equal(found.top_token_ids[0], found.top_token_ids[1])

    @pytest.mark.parametrize("num_outputs", [0, 2, 3])
    def test_min_tokens(self, num_outputs: int) -> None:
        draw = draw_of(outputs=[9] * num_outputs, min_tokens=3, stop_token_ids=[4, 5], temperature=0.0)
        banned = sorted(set(range(VOCAB)) - set(finite_after(logits_of(), draw)))
        assert banned == ([4, 5] if num_outputs < 3 else [])

    def test_penalties(self) -> None:
        """Repetition covers prompt and outputs; presence and frequency cover outputs. A penalized token is best exactly where
        the others are less than its remaining value."""
        settings: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        draw = draw_of(prompt=[3, 40], outputs=[3, 41, 41], temperature=0.0, **settings)
        logits = np.linspace(-5, 5, VOCAB, dtype=np.float32)
        expected = reference_sampler.process(logits, draw)
        assert expected[3] == logits[3] * 2 - 0.75
        assert expected[40] == logits[40] / 2
        assert expected[41] == logits[41] / 2 - 1.0
        for token_id in (3, 40, 41, 20):
            for rest, is_best in (
                (np.nextafter(expected[token_id], np.float32(-99)), True),
                (expected[token_id] + 0.01, False),
            ):
                row = np.full((1, VOCAB), rest, np.float32)
                row[0, token_id] = logits[token_id]
                row[0, [other for other in (3, 40, 41) if other != token_id]] = -50
                assert (sampled(row, [draw]) == [token_id]) is is_best


class TestTruncation:
    def test_top_k(self) -> None:
        logits = logits_of()
        assert support(logits, temperature=3.0, top_k=4) == set(best_ids(logits, 4))
        assert support(logits, temperature=3.0, top_k=1) == set(best_ids(logits, 1))

    def test_top_k_of_equals_takes_the_lowest_ids(self) -> None:
        assert support(np.zeros((1, VOCAB), np.float32), top_k=3) == {0, 1, 2}
        logits = np.zeros((1, 5000), np.float32)
        logits[0, 1::2] = -0.0
        logits[0, 4000] = 1.0
        assert support(logits, top_k=4) == {4000, 0, 1, 2}

    def test_top_p(self) -> None:
        logits = logits_of(2)
        weights = np.exp(reference_sampler.logprobs_of(logits[0]))
        order = best_ids(logits, VOCAB)
        count = int(np.searchsorted(np.cumsum(weights[order]), 0.7)) + 1
        found = support(logits, top_p=0.7)
        assert found <= set(order[:count])
        assert {token_id for token_id in order[:count] if weights[token_id] > 0.03} <= found
        assert support(logits, top_p=0.0) == {order[0]}

    def test_top_p_of_equals_takes_the_lowest_ids(self) -> None:
        assert support(np.zeros((1, 40), np.float32), top_p=0.1) == {0, 1, 2, 3}

    def test_zeros_of_both_signs_are_equal(self) -> None:
        zeros = np.zeros((1, 400), np.float32)
        signed = zeros.copy()
        signed[0, 1::2] *= -1
        for first in (0, 1):  # which of them is the largest
            mixed = np.roll(signed, first, axis=1)
            assert support(mixed, top_p=0.5) == support(zeros, top_p=0.5)
            assert sampled(mixed, [draw_of(top_p=0.9)]) == sampled(zeros, [draw_of(top_p=0.9)])

    def test_min_p(self) -> None:
        logits = logits_of(3)
        weights = np.exp((logits[0] - logits[0].max()).astype(np.float64) / 2.0)
        assert support(logits, temperature=2.0, min_p=0.3) == set(np.flatnonzero(weights >= 0.3).tolist())
        assert support(logits, min_p=1.0) == set(best_ids(logits, 1))

    def test_top_p_applies_after_top_k(self) -> None:
        """Two equal tokens of three: each is half, so half suffices for one."""
        logits = np.full((1, VOCAB), -9.0, np.float32)
        logits[0, [10, 20, 30]] = 1.0
        assert support(logits, top_k=2, top_p=0.5) == {10}
        assert support(logits, top_k=2, top_p=0.51) == {10, 20}

    def test_top_n_sigma(self) -> None:
        logits = logits_of()
        for num in (0.5, 1.0, 2.0):
            bound = logits.max() - num * logits.std(dtype=np.float64)
            assert support(logits, temperature=50.0, top_n_sigma=num) == set(np.flatnonzero(logits[0] >= bound).tolist())

    def test_typical_p_drops_too_likely_tokens(self) -> None:
        logits = np.log(np.array([[0.3, 0.15, 0.15, 0.15, 0.15, 0.1]], np.float32))  # 1.73 nats on average
        assert support(logits, typical_p=0.5) == {1, 2, 3, 4}
        assert support(logits, typical_p=0.65) == {1, 2, 3, 4, 0}

    def test_xtc_keeps_the_least_likely_candidate(self) -> None:
        logits = np.log(np.array([[0.4, 0.3, 0.2, 0.06, 0.04]], np.float32))
        assert support(logits, xtc_probability=1.0, xtc_threshold=0.1) == {2, 3, 4}
        assert support(logits, xtc_probability=1.0, xtc_threshold=0.35) == {0, 1, 2, 3, 4}, "one alone is left alone"
        assert support(logits, xtc_probability=0.5, xtc_threshold=0.1) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("length", [1, 2, 7, 40, 200])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"dry_allowed_length": 0},
        {"dry_allowed_length": 4},
        {"dry_last_n": 6},
        {"dry_last_n": 0},
        {"dry_breaker_token_ids": [1]},
        {"dry_base": 90.0, "dry_multiplier": 100.0},
    ],
    ids=str,
)
def test_repeated_text_is_penalized(length: int, params: dict[str, Any]) -> None:
    """Random texts of three words follow the definition: a token is the best where the other one is less than its remaining
    value."""
    for seed in range(6):
        tokens = np.random.default_rng(seed).integers(0, 3, length).tolist()
        draw = draw_of(tokens[: length // 2], tokens[length // 2 :], **{"temperature": 0.0, "dry_multiplier": 0.8, **params})
        expected = reference_sampler.process(np.zeros(VOCAB, np.float32), draw)
        for token_id in range(4):
            margin = np.float32(1e-5 * max(1.0, abs(float(expected[token_id]))))
            for rest, is_best in ((expected[token_id] - margin, True), (expected[token_id] + margin, False)):
                row = np.full((1, VOCAB), -3e38, np.float32)
                row[0, [token_id, 9]] = 0.0, rest
                assert (sampled(row, [draw]) == [token_id]) is is_best, (tokens, token_id)


KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"temperature": 2.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 3000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 400, "min_p": 1e-4},
    {"temperature": 1.3, "presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {3: 9.0, 7: -5.0}, "top_p": 0.95},
    {"temperature": 1.0, "repetition_penalty": 1.3, "allowed_token_ids": list(range(0, 5000, 3)), "top_k": 20},
    {"temperature": 1.2, "top_n_sigma": 1.0},
    {"temperature": 1.5, "top_n_sigma": 2.5, "top_k": 100, "typical_p": 0.7},
    {"temperature": 0.9, "typical_p": 0.4},
    {"temperature": 1.1, "typical_p": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 1e-3},
    {"temperature": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0.001},
    {"temperature": 1.0, "dry_multiplier": 3.0, "dry_base": 1.5, "dry_allowed_length": 1, "dry_breaker_token_ids": [8]},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": [2, 5], "bad_words_token_ids": [[8, 8, 11], [1]]},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0], ids=["flat", "usual", "steep"])
def test_sampler_agrees_with_the_float64_reference(kind: dict[str, Any], spread: float) -> None:
    """The same token as in float64 with sorts, unless the drawn number is within 1e-5 of where the next token begins."""
    vocab, count = 5000, 60
    logits = logits_of(5, count, vocab) * np.float32(spread)
    logits[:, ::97] = np.round(logits[:, ::97])  # some equal ones
    draws = [draw_of([1, 8, 2 * index, 3], [9, 8, 8], seed=index, sample_index=index % 3, **kind) for index in range(count)]
    for row, (found, draw) in enumerate(zip(sampled(logits, draws), draws, strict=True)):
        numbers = [min(max(draw.number + shift, 0.0), 1.0) for shift in (0, -1e-5, 1e-5)]
        if not any(found == reference_sampler.sample(logits[row], draw, number) for number in numbers):
            # truncation at a boundary of top_p: the kept sets differ by one token, the draws by what that shifts
            kept = reference_sampler.weights_of(reference_sampler.process(logits[row], draw), draw.params)
            pytest.fail(f"row {row}: {found} is of none of {numbers}; {np.count_nonzero(kept)} tokens are kept")


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, *(kind for kind in KINDS if "allowed_token_ids" not in kind)], ids=str)
def test_masked_logits_do_not_change_the_draw(kind: dict[str, Any]) -> None:
    """The same bits, wherever the mask leaves tokens and however many."""
    vocab = 5003
    rng = np.random.default_rng(8)
    masks = [rng.random(vocab) < share for share in (0.001, 0.02, 0.5, 0.999) for _ in range(10)]
    for begin, end in ((0, vocab), (0, 1024), (1024, 1056), (2047, 2049), (vocab - 3, vocab)):
        masks.append(np.zeros(vocab, np.bool_))
        masks[-1][begin:end] = True
    logits = logits_of(9, len(masks), vocab)
    alone = np.where(masks, logits, np.float32(-np.inf))
    draws = [draw_of([1, 8], [9], seed=row, mask=mask, **kind) for row, mask in enumerate(masks)]
    expected = [draw_of([1, 8], [9], seed=row, **kind) for row in range(len(masks))]
    found = sampled(logits, draws)
    assert found == sampled(alone, expected)
    assert all(mask[token_id] for mask, token_id in zip(masks, found, strict=True))


@pytest.mark.parametrize(
    "kind", [{"temperature": 0.8}, {"temperature": 2.0, "top_k": 30}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_draws_follow_the_distribution(kind: dict[str, Any]) -> None:
    logits = logits_of(5) / 3
    draws = [draw_of([0], seed=seed, **kind) for seed in range(800)]
    weights = reference_sampler.weights_of(logits[0], draws[0].params)
    expected = weights / weights.sum() * len(draws)
    counts = np.bincount(sampled(np.repeat(logits, len(draws), axis=0), draws), minlength=VOCAB)
    is_kept = expected > 0
    assert not counts[~is_kept].any()
    assert ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum() < 95  # chi square, 49 degrees of freedom at most


def test_draw_inverts_the_cumulative_distribution() -> None:
    logits = logits_of(6, 4, 3000)
    draws = [draw_of(prompt=[0] * length, seed=3, sample_index=2) for length in (1, 2, 3, 77)]
    for row, (draw, found) in enumerate(zip(draws, sampled(logits, draws), strict=True)):
        sums = np.cumsum(np.exp(logits[row].astype(np.float64) - logits[row].max()))
        assert found == np.searchsorted(sums, _cpu.uniform(3, len(draw.token_ids), 2) * sums[-1], side="right")


class TestBroken:
    @pytest.mark.parametrize("bad", [np.full(VOCAB, -np.inf), np.full(VOCAB, np.nan), np.full(VOCAB, np.inf)])
    @pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5, "logit_bias": {3: 1.0}}], ids=str)
    def test_broken_weights_still_return_a_token(self, bad: np.ndarray, kind: dict[str, Any]) -> None:
        """Broken weights, or everything masked: some token is returned, nothing is raised."""
        found = scores_of(bad[None].astype(np.float32), [draw_of(num_logprobs=3, **kind)])
        assert found.token_ids.tolist() == [0]
        assert np.isnan(found.logprobs).all()
        assert found.top_token_ids.tolist() == [[0, 1, 2]]

    def test_first_nan_is_taken(self) -> None:
        logits = logits_of(0, 1, 3000)
        logits[0, [2100, 2900]] = np.nan
        logits[0, 5] = np.inf
        for kind in ({"temperature": 0.0}, {}, {"top_k": 3}):
            assert sampled(logits, [draw_of(**kind)]) == [2100]

    def test_masked_logits_are_never_drawn(self) -> None:
        logits = np.full((1, 3000), -np.inf, np.float32)
        logits[0, [1500, 2999]] = [1.0, 0.0]
        assert support(logits) == {1500, 2999}
        assert support(logits, top_k=9) == {1500, 2999}


class TestLogprobs:
    def test_log_probabilities_agree_with_float64(self) -> None:
        logits = logits_of(9, 3, 3000)
        exact = reference_sampler.logprobs_of(logits)
        token_ids = np.array([4, 0, 2999], np.int32)
        found = sampler.score(logits, token_ids, 5)
        np.testing.assert_allclose(found.logprobs, exact[[0, 1, 2], token_ids], atol=2e-6)
        assert found.ranks.tolist() == [
            1 + int((logits[row] > logits[row, token]).sum()) for row, token in enumerate(token_ids)
        ]
        for row in range(3):
            assert found.top_token_ids[row].tolist() == reference_sampler.best_ids(logits[row], 5)
            np.testing.assert_allclose(found.top_logprobs[row], exact[row, found.top_token_ids[row]], atol=2e-6)

    def test_log_probabilities_use_the_raw_logits(self) -> None:
        """Log-probabilities are filled where they are wanted."""
        logits = logits_of(10, 4)
        kinds: list[dict[str, Any]] = [
            {"num_logprobs": 0, "temperature": 0.0},
            {"num_logprobs": -1},
            {"num_logprobs": 4, "temperature": 0.5, "top_k": 9},
            {"num_logprobs": 2, "logit_bias": {33: 90.0}},
        ]
        found = scores_of(logits, [draw_of(**kind) for kind in kinds])
        exact = reference_sampler.logprobs_of(logits)
        for row in (0, 2, 3):
            np.testing.assert_allclose(found.logprobs[row], exact[row, found.token_ids[row]], atol=2e-6)
            assert found.ranks[row] == 1 + np.count_nonzero(logits[row] > logits[row, found.token_ids[row]])
        assert found.token_ids[3] == 33
        assert (found.logprobs[1], found.ranks[1]) == (0, 0)
        assert found.top_token_ids.shape == (4, 4)
        assert found.top_token_ids[2].tolist() == best_ids(logits[2:3], 4)
        assert found.top_token_ids[3, :2].tolist() == best_ids(logits[3:4], 2)

    @pytest.mark.parametrize("count", [0, 1, VOCAB, VOCAB + 10])
    def test_any_number_of_top_tokens(self, count: int) -> None:
        found = sampler.score(logits_of(), np.array([3], np.int32), count)
        assert found.top_token_ids.shape == found.top_logprobs.shape == (1, min(count, VOCAB))
        assert found.top_token_ids[0].tolist() == best_ids(logits_of(), count)

    def test_broken_logits_still_have_top_tokens(self) -> None:
        partly = np.array([[np.nan, 1.0, np.nan, 2.0]], np.float32)
        assert sampler.score(partly, np.array([1], np.int32), 4).top_token_ids.tolist() == [[3, 1, 0, 2]]

    def test_equal_top_tokens_are_ordered_by_id(self) -> None:
        logits = np.zeros((1, 3000), np.float32)
        logits[0, 1030] = 1
        assert sampler.score(logits, np.array([1], np.int32), 4).top_token_ids.tolist() == [[1030, 0, 1, 2]]

    def test_token_beyond_the_vocabulary_fails(self) -> None:
        with pytest.raises(AssertionError, match="beyond the vocabulary"):
            sampler.score(logits_of(), np.array([VOCAB], np.int32), 0)


@pytest.mark.parametrize("vocab", [300, 20_000])
def test_rows_do_not_depend_on_their_batch(request: pytest.FixtureRequest, vocab: int) -> None:
    """Any rows, in any order, on any number of threads: the same bits."""
    rows = 48
    logits = logits_of(8, rows, vocab)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.0, "num_logprobs": -1}, *KINDS]
    draws = [
        draw_of([1] * (row + 1), [4, 4], seed=row, **{"num_logprobs": row % 3, **kinds[row % len(kinds)]})
        for row in range(rows)
    ]
    whole = scores_of(logits, draws)
    scored = sampler.score(logits, whole.token_ids, 3)
    order = np.random.default_rng(4).permutation(rows)
    name = _cpu.variant()
    for threads in (1, 2, 5):
        with table(f"{name}-{threads}"):
            for chosen in ([0], [5], [47], list(range(3, 20)), order.tolist(), order[:7].tolist()):
                part = np.ascontiguousarray(logits[chosen])
                found = scores_of(part, [draws[row] for row in chosen])
                assert_equal(found, whole, np.array(chosen))
                assert_equal(sampler.score(part, whole.token_ids[chosen], 3), scored, np.array(chosen))


def assert_equal(found: Scores, whole: Scores, chosen: np.ndarray) -> None:
    num_top = found.top_token_ids.shape[1]
    np.testing.assert_array_equal(found.token_ids, whole.token_ids[chosen])
    np.testing.assert_array_equal(found.logprobs, whole.logprobs[chosen])
    np.testing.assert_array_equal(found.ranks, whole.ranks[chosen])
    np.testing.assert_array_equal(found.top_token_ids, whole.top_token_ids[chosen][:, :num_top])
    np.testing.assert_array_equal(found.top_logprobs, whole.top_logprobs[chosen][:, :num_top])
