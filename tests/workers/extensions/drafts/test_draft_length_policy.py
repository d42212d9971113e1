"""Draft lengths of rows, chosen by their acceptance and by made-up times of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from engine.messages import SamplingParams, SlotStart
from ops._cpu import StepTimes
from tests.workers.serving import swap_slots
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.draft_length_policy import Lengths
from workers.extensions.drafts.drafter import Drafts

K = 8
LONGEST_PAUSE = 256  # as ops/cpu/native/draft_lengths.cpp: tokens without drafts, then one is tried
PRIORS = np.array([0.3, 0.6, 0.9])
NONE = np.zeros(0, np.int32)


def flat(num_rows: int) -> float:
    """Return the nanoseconds of a step, dominated by the weights."""
    return 1e6 * (1 + num_rows / 200)


def steep(num_rows: int) -> float:
    """Return the nanoseconds of a step, proportional to its rows."""
    return 1e6 * num_rows


class Rig:
    """BatchSlots with drafts of one class, steps that verify them, and the times of these."""

    def __init__(
        self, num_slots: int = 4, time_of: Callable[[int], float] = flat, *, is_adaptive: bool = True, are_layers: bool = False
    ) -> None:
        self.slots = BatchSlots(np.zeros((1, num_slots + 1, 4), np.int32), 100, 100, K)
        self.lengths = Lengths(self.slots, PRIORS, [0], [are_layers], is_adaptive=is_adaptive)
        self.which = np.arange(num_slots, dtype=np.int32)
        self.time_of = time_of
        for slot in range(num_slots):
            self.start(slot)

    def start(self, slot: int) -> None:
        token_ids = np.array([1, 2], np.int32).tobytes()
        self.slots.start(SlotStart(slot, "r", token_ids, 2, SamplingParams(), b""))

    def propose(self, of_class: int, num_drafts: int = K) -> None:
        self.offer(np.full(K, of_class, np.int32), num_drafts)

    def offer(self, classes: np.ndarray, num_drafts: int = K) -> None:
        found = Drafts.empty(len(self.which), K)
        found.counts[:], found.classes[:] = num_drafts, classes
        self.lengths.clear(self.which)
        self.lengths.offer(self.which, found)

    def step(self, of_class: int, num_right: list[int], granted: int = K, num_drafts: int = K) -> list[int]:
        """Run a step with `num_right` right drafts first in each slot; return the number of drafts of each."""
        self.propose(of_class, num_drafts)
        grants, num_slots = np.full(len(self.which), granted, np.int32), len(self.which)
        chosen = self.lengths.choose(self.which, grants, num_slots, num_slots)
        self.lengths.learn(self.which, chosen, 1 + np.minimum(chosen, num_right))
        num_rows = num_slots + int(chosen.sum())
        self.learn_time(num_rows)
        return [int(number) for number in chosen]

    def learn_time(self, num_rows: int, step_ns: float = 0, *, has_prompts: bool = False) -> None:
        """Learn the time of a step of all slots; step_ns 0: the time by this rig."""
        num_ns = int(step_ns or self.time_of(num_rows))
        self.lengths.learn_time(num_rows, num_ns, has_prompts=has_prompts, has_drafts=num_rows > len(self.which))


def test_accepted_drafts_are_requested_at_full_length() -> None:
    rig = Rig(1)
    for _ in range(30):
        last = rig.step(1, [K])
    assert last == [K]
    assert rig.lengths.wanted(rig.which).tolist() == [K]


def test_length_follows_the_accepted_tokens() -> None:
    """The third draft token is always wrong: no more than three are tried, most of the time."""
    rig = Rig(1, lambda num_rows: 1e6 * (1 + num_rows / 20))
    chosen = []
    for _ in range(200):
        rig.offer(np.minimum(np.arange(K), 2))
        number = rig.lengths.choose(rig.which, np.full(1, K, np.int32), 1, 1)
        rig.lengths.learn(rig.which, number, 1 + np.minimum(number, 2))
        rig.learn_time(1 + int(number[0]))
        chosen.append(int(number[0]))
    assert np.median(chosen[50:]) == 2


def test_undraftable_text_costs_almost_nothing() -> None:
    rig = Rig(1, steep)
    num_drafts = [rig.step(1, [0])[0] for _ in range(4000)]
    assert 0 < sum(num_drafts[100:]) <= 4000 / LONGEST_PAUSE + 6
    assert sum(num_drafts[:100]) < 30


@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_undraftable_answers_are_not_slower(num_slots: int) -> None:
    """One after the other, at a sixteenth of the time for each additional row of a step."""
    rig = Rig(num_slots, lambda num_rows: 1e6 * (1 + num_rows / 16))
    shares = []
    for _ in range(4):
        for slot in range(num_slots):
            rig.start(slot)
        rows, num_wanting = [], []
        for _ in range(64):
            rows.append(num_slots + sum(rig.step(1, [0] * num_slots)))
            num_wanting.append(np.count_nonzero(rig.lengths.wanted(rig.which)))
        shares.append(sum(map(rig.time_of, rows)) / (64 * rig.time_of(num_slots)))
        assert max(num_wanting[32:]) <= 1, "one is tried at a time, and nobody else is made ready"
    assert shares[0] < 1.03
    assert max(shares[1:]) < 1.01


def test_failed_drafts_are_tried_again() -> None:
    """No chance becomes too small to recover."""
    rig = Rig(1, flat)
    for _ in range(20000):
        rig.propose(2)
        rig.lengths.learn(rig.which, np.full(1, K, np.int32), np.ones(1, np.int32))
    chosen = [rig.step(2, [K])[0] for _ in range(2 * LONGEST_PAUSE)]
    assert chosen[-1] == K


def test_short_answers_are_tried_again() -> None:
    """Each ends before its own pause does."""
    rig = Rig(4, steep)
    for _ in range(600):
        rig.step(1, [0] * 4)
    rig.time_of = flat
    num_drafts, granted = 0, np.zeros(4, np.int32)
    for count in range(4000):
        if count % 12 == 0:
            for slot in range(4):
                rig.start(slot)
            granted[:] = rig.lengths.wanted_by_new_requests()
        rig.propose(2)
        chosen = rig.lengths.choose(rig.which, granted, 4, 4)
        num_rows = 4 + int(chosen.sum())
        num_drafts += num_rows - 4
        rig.lengths.learn(rig.which, chosen, 1 + chosen)
        rig.learn_time(num_rows)
        granted = rig.lengths.wanted(rig.which)
    assert num_drafts > 1000


def short_answers(rig: Rig, num_steps: int, num_right: int = 0) -> list[tuple[int, bool]]:
    """Run answers of 12 steps each, one after another; return for each step how many drafts were verified and whether any slot
    was prepared for some."""
    granted, found = np.full(len(rig.which), rig.lengths.wanted_by_new_requests(), np.int32), []
    for count in range(num_steps):
        if count % 12 == 0:
            for slot in rig.which.tolist():
                rig.start(slot)
            granted[:] = rig.lengths.wanted_by_new_requests()
        rig.propose(1)
        chosen = rig.lengths.choose(rig.which, granted, len(rig.which), len(rig.which))
        rig.lengths.learn(rig.which, chosen, 1 + np.minimum(chosen, num_right))
        rig.learn_time(len(rig.which) + int(chosen.sum()))
        found.append((int(chosen.sum()), bool(granted.any())))
        granted = rig.lengths.wanted(rig.which)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_hopeless_slots_are_not_prepared(num_slots: int) -> None:
    """New sequences are not prepared either: layers that draft would compute their prompts, too."""
    rig = Rig(num_slots, lambda num_rows: 1e6 * (1 + num_rows / 16))
    found = short_answers(rig, 4000)
    assert np.mean([is_ready for _, is_ready in found]) < 0.1
    assert sum(rig.time_of(num_slots + num) for num, _ in found) < 1.015 * 4000 * rig.time_of(num_slots)


@pytest.mark.slow
def test_unsuccessful_retries_become_rare() -> None:
    """Drafts that are tried in each 3,000 steps; after many failures, predictable answers are still drafted."""
    rig = Rig(4, steep)
    num_drafts = [sum(num for num, _ in short_answers(rig, 3000)) for _ in range(4)]
    assert max(num_drafts[1:]) < num_drafts[0]
    rig.time_of = flat
    assert np.mean([num for num, _ in short_answers(rig, 3000, K)][-1000:]) > 4


def test_retried_slots_are_prepared_in_one_step() -> None:
    """Wanted drafts come two steps later; layers draft for slots that were prepared in the step before, so the second of each
    two requested steps tries. A resting slot reports nothing in between, and `lengths` says for how long."""
    rig = Rig(1, lambda num_rows: 1e6 * (1 + num_rows), are_layers=True)
    coming, is_ready, num_ready, num_tried, num_idle = deque([0, 0]), False, 0, 0, 0
    for number in range(12000):
        granted = np.full(1, coming.popleft(), np.int32)
        rig.lengths.clear(rig.which)
        if is_ready:
            rig.propose(1)
        chosen = rig.lengths.choose(rig.which, granted, 1, 1)
        rig.lengths.learn(rig.which, chosen, np.ones(1, np.int32))
        rig.learn_time(1 + int(chosen[0]))
        coming.append(int(rig.lengths.wanted(rig.which)[0]))
        is_ready = granted[0] > 0
        num_idle -= 1
        if number > 4000:
            num_ready, num_tried = num_ready + is_ready, num_tried + int(chosen[0])
            assert num_idle <= 0 or not coming[-1], "it was said that nothing is of interest yet"
            num_idle = max(num_idle, rig.lengths.num_idle(rig.which))
    assert 40 < 2 * num_tried <= num_ready < 2.2 * num_tried
    assert 3 * 0.5 * num_tried < 0.005 * 8000 + 2, "making ready counts twice what the row more takes"


def test_new_requests_start_like_recent_sequences() -> None:
    rig = Rig(4)
    assert rig.lengths.wanted_by_new_requests() == K, "the first ones are worth a try"
    for right in (0, K):
        for _ in range(600):
            rig.step(1, [right] * 4)
        rig.start(0)
        assert rig.lengths.wanted_by_new_requests() == rig.lengths.wanted(rig.which)[0] == right
        rig.propose(1)
        grants = np.full(4, K, np.int32)
        assert rig.lengths.choose(rig.which, grants, 4, 4)[0] == right
    assert Rig(2, is_adaptive=False).lengths.wanted_by_new_requests() == K


def test_successful_probe_restores_drafting() -> None:
    rig = Rig(1)
    for _ in range(600):
        rig.step(1, [0])
    for _ in range(1200):
        last = rig.step(1, [K])[0]
    assert last == K


def test_sequences_learn_independently() -> None:
    """Drafts of the same class: the sequences differ."""
    rig = Rig(2, lambda num_rows: 1e6 * (1 + num_rows / 10))
    chosen = np.array([rig.step(1, [K, 0]) for _ in range(400)])[100:]
    assert chosen[:, 0].mean() > 6
    assert chosen[:, 1].mean() < 0.5


def test_expensive_steps_get_fewer_drafts() -> None:
    means = []
    for time_of in (flat, lambda num_rows: 1e6 * (1 + num_rows / 8), steep):
        rig = Rig(4, time_of)
        rng = np.random.default_rng(1)
        chosen = [rig.step(2, rng.geometric(0.5, 4).tolist()) for _ in range(300)]
        means.append(np.mean(chosen[100:]))
    assert means[0] > means[1] > means[2] < 0.2


def test_budget_goes_to_the_most_promising_drafts() -> None:
    rig = Rig(2, lambda num_rows: 1e6 * max(3, num_rows) ** 2)
    for _ in range(40):
        rig.learn_time(2, 3e6)
        rig.learn_time(3, 3e6)
        rig.learn_time(4, 9e6)
    rig.slots.draft_chances[:2, 0] = 0.5, 0.8
    rig.slots.num_drafts[:2] = 1
    assert rig.lengths.choose(rig.which, np.full(2, K, np.int32), 2, 2).tolist() == [0, 1]


@pytest.mark.parametrize(("granted", "num_drafts"), [(0, K), (3, K), (K, 2), (K, 0)])
def test_never_more_drafts_than_available(granted: int, num_drafts: int) -> None:
    for is_adaptive in (True, False):
        rig = Rig(3, is_adaptive=is_adaptive)
        for _ in range(20):
            assert max(rig.step(2, [K] * 3, granted, num_drafts)) <= min(granted, num_drafts)


def test_fixed_length_never_changes() -> None:
    rig = Rig(2, steep, is_adaptive=False)
    assert [rig.step(1, [0, 0]) for _ in range(60)] == [[K, K]] * 60
    assert rig.lengths.wanted(rig.which).tolist() == [K, K]


def test_swapped_slots_keep_their_lengths() -> None:
    """Swapped slots keep what they learned."""
    rig = Rig(2)
    for _ in range(5):
        rig.step(1, [K, 0])
    rig.propose(1)
    before = rig.slots.draft_chances.copy()
    swap_slots(rig.slots, 0, 1)
    rig.propose(1)
    np.testing.assert_array_equal(rig.slots.draft_chances, before[::-1])


PLAIN, DRAFTED, MIXED = (False, False), (False, True), (True, False)  # has prompts, has drafts


def test_drafts_after_a_stop_token_are_ignored() -> None:
    """Short answers: in the last row of each the first draft is right and ends it, so later ones cannot be accepted."""
    rig = Rig(1)
    for _ in range(60):
        rig.start(0)
        for _ in range(3):
            last = rig.step(2, [K])
        rig.propose(2)
        rig.slots.is_ended[0] = True
        rig.lengths.learn(rig.which, np.full(1, K, np.int32), np.ones(1, np.int32))
        assert last == [K]
    assert rig.lengths.wanted_by_new_requests() == K
    rig.start(0)
    rig.propose(2)
    assert rig.slots.draft_chances[0, 0] > 0.9, "as if no answer had ended"


def test_step_times_are_interpolated() -> None:
    times = StepTimes()
    for _ in range(100):
        for num_rows in (1, 9):
            times.learn(*PLAIN, num_rows, flat(num_rows) if num_rows == 1 else 2 * flat(1))
    found = [times.of(*PLAIN, num_rows) for num_rows in range(1, 12)]
    assert found == sorted(found)
    assert found[4] / found[0] == pytest.approx(1.5, rel=0.05)
    for _ in range(100):
        times.learn(*PLAIN, 1, 4 * flat(1))  # a longer context: all steps take longer
    assert times.of(*PLAIN, 9) == pytest.approx(8 * flat(1), rel=0.4)


def test_delayed_step_barely_affects_other_sizes() -> None:
    """Steps of 6 and 12 rows: more rows never take less, so an outlier is averaged with its neighbours."""
    times = StepTimes()
    for number in range(400):
        for num_rows in (4, 5, 6, 7, 8):
            times.learn(*DRAFTED, num_rows, flat(num_rows) * (50 if num_rows == 6 and number == 0 else 1))
        assert times.of(*DRAFTED, 6) < 2.1 * flat(6)
    found = [times.of(*DRAFTED, num_rows) for num_rows in range(4, 9)]
    assert found == sorted(found)
    assert found == pytest.approx([flat(num_rows) for num_rows in range(4, 9)], rel=0.1)


@pytest.mark.parametrize("num_slots", [1, 4])
def test_delayed_first_step_does_not_stop_drafting(num_slots: int) -> None:
    """The rank was stopped, or touched memory for the first time: nothing else is known of such steps yet."""
    rig = Rig(num_slots)
    while not any(rig.step(1, [K] * num_slots)):
        rig.time_of = lambda num_rows: flat(num_rows) * (1000 if num_rows > num_slots else 1)
    rig.time_of = flat
    assert np.mean([rig.step(1, [K] * num_slots) for _ in range(50)]) > 0.9 * K


def test_first_step_of_expected_length_is_trusted() -> None:
    """Prompts take far more than the times of steps without them suggest."""
    times = StepTimes()
    for _ in range(20):
        times.learn(*PLAIN, 1, 1e6)
    for _ in range(20):
        times.learn(*MIXED, 512, 200e6)
    assert times.of(*MIXED, 512) == pytest.approx(200e6, rel=0.35)
    assert times.of(*PLAIN, 1) == pytest.approx(1e6, rel=0.01)


def test_new_sequences_are_tried_again() -> None:
    """Drafts are accepted only for sequences that had some from their first token on: layers know nothing of the tokens of a
    rested sequence, and each ends before long."""
    rig = Rig(4, flat)
    for _ in range(600):
        rig.step(1, [0] * 4)
    assert rig.lengths.wanted_by_new_requests() == 0
    granted, are_drafted, num_drafts = np.zeros(4, np.int32), np.ones(4, np.bool_), []
    for count in range(3000):
        if count % 12 == 0:
            for slot in range(4):
                rig.start(slot)
            granted[:], are_drafted[:] = rig.lengths.wanted_by_new_requests(), True
        rig.propose(1)
        chosen = rig.lengths.choose(rig.which, granted, 4, 4)
        are_drafted &= chosen > 0
        rig.lengths.learn(rig.which, chosen, 1 + np.where(are_drafted, chosen, 0))
        rig.learn_time(4 + int(chosen.sum()))
        granted = rig.lengths.wanted(rig.which)
        num_drafts.append(int(chosen.sum()))
    assert np.mean(num_drafts[-500:]) > 4


def test_prompt_steps_do_not_count_as_draft_steps() -> None:
    """Short prompts take long, since others start in their steps: steps of as many rows with drafts do not."""
    rig = Rig(4)
    for _ in range(40):
        for num_rows in (8, 16, 24, 36):
            rig.learn_time(num_rows, 4 * flat(num_rows), has_prompts=True)
        rig.step(2, [K] * 4)
    assert rig.step(2, [K] * 4) == [K] * 4


def test_plain_step_times_cover_similar_sizes() -> None:
    times = StepTimes()
    for _ in range(300):
        times.learn(*DRAFTED, 40, 2e6)
    assert times.num_plain_since(10) > 256
    times.learn(*PLAIN, 9, 1e6)
    assert times.num_plain_since(10) == 0
    assert times.num_plain_since(20) > 256


def test_old_step_times_are_forgotten() -> None:
    """A single measurement must not rule out a number of rows for ever."""
    times = StepTimes()
    for _ in range(20):
        times.learn(*PLAIN, 1, 1e6)
    times.learn(*DRAFTED, 3, 1.9e6)
    assert times.of(*DRAFTED, 3) > 1.5e6
    for _ in range(3000):
        times.learn(*PLAIN, 1, 1e6)
    assert times.of(*DRAFTED, 3) < 1.2e6
