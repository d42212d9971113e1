"""Confidence of layers that draft, and the acceptance rate of draft tokens at each level of it."""

from __future__ import annotations

import numpy as np
import pytest

from ops import _cpu
from ops._cpu import DraftChances

NUM_CLASSES = DraftChances.NUM_CLASSES


@pytest.mark.parametrize("vocab", [1, 7, 64, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_likeliest_token_and_its_probability(vocab: int, num_rows: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((num_rows, vocab)) * rng.uniform(0.1, 9, (num_rows, 1))).astype(np.float32)
    if num_rows > 1:
        logits[0] = 0.5  # the first of equals
        logits[1, : vocab // 2] = -np.inf
        logits[2, vocab // 2] = 60
    weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    token_ids, probabilities = zip(*_cpu.choose_draft_tokens(_cpu.address(logits), num_rows, vocab), strict=True)
    assert list(token_ids) == logits.argmax(1).tolist()
    np.testing.assert_allclose(probabilities, 1 / weights.sum(1), rtol=1e-5)


def test_logits_that_are_not_finite() -> None:
    logits = np.zeros((3, 2000), np.float32)
    logits[0, 1500], logits[1, 30], logits[2] = np.nan, np.inf, -np.inf
    found = _cpu.choose_draft_tokens(_cpu.address(logits), 3, 2000)
    assert all(0 <= token_id < 2000 for token_id, _ in found)
    assert [probability for _, probability in found] == [0, 0, 0]


def test_classes_are_ordered_by_probability() -> None:
    found = [DraftChances.class_of(number / 1000) for number in range(1001)]
    assert found == sorted(found)
    assert set(found) == set(range(NUM_CLASSES))


class Rig:
    """Acceptance chances of draft tokens at three places."""

    def __init__(self) -> None:
        self.table = np.zeros((3, NUM_CLASSES))
        self.native = DraftChances(3, _cpu.address(self.table))

    def met(self, place: int, which: int, share: float, count: int = 400) -> None:
        """Learn from `count` draft tokens, a share of them accepted."""
        for number in range(count):
            self.native.learn(place, which, int((number + 1) * share) > int(number * share))
            self.native.tell()


def test_initial_chances_grow_with_confidence() -> None:
    rig = Rig()
    assert (np.diff(rig.table, axis=1) > 0).all(), "the surer the likelier"
    assert (rig.table > 0).all()
    assert (rig.table < 1).all()


def test_acceptance_is_learned_by_position_and_certainty() -> None:
    rig = Rig()
    rig.met(0, 2, 0.75)
    rig.met(1, 2, 0.25)
    rig.met(0, 6, 0.1)
    assert rig.table[0, 2] == pytest.approx(0.75, abs=0.08)
    assert rig.table[1, 2] == pytest.approx(0.25, abs=0.08)
    assert rig.table[0, 6] == pytest.approx(0.1, abs=0.05)
    assert rig.table[0, 4] == Rig().table[0, 4], "nothing was met of it"


def test_unreached_places_copy_the_one_before() -> None:
    """Otherwise an early failure at a place would prevent any later try there."""
    rig = Rig()
    rig.met(1, 3, 0)
    assert rig.table[1, 3] < 0.1
    assert rig.table[2, 3] < 0.2
    rig.met(0, 3, 0.9, 4000)
    assert rig.table[:, 3] == pytest.approx([0.9] * 3, abs=0.06)
