"""Several drafters combined: the choice of draft tokens, the messages to each, and the counts."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams, SlotStart, Step
from workers.engine.batch_slots import BatchSlots
from workers.engine.rows import StepRows
from workers.extensions.drafts.drafter import Drafts
from workers.extensions.drafts.drafting import Drafting, make_drafting
from workers.rank_group.collectives import OneRank

K = 4


def int32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


class Rig:
    """BatchSlots, and all methods that need no layers."""

    def __init__(self, method: str = "ngram,suffix") -> None:
        self.slots = BatchSlots(np.zeros((1, 4, 4), np.int32), 300, 1000, K)
        config = SpeculativeConfig(method=method, num_speculative_tokens=K, adaptive=False, suffix_decoding_max_spec_factor=4.0)
        drafting = make_drafting(config, self.slots)
        assert drafting is not None
        self.drafting: Drafting = drafting

    def step(self, *starts: SlotStart, ended: bytes = b"", generation: int = 0) -> None:
        empty = int32()
        step = Step(1, list(starts), empty, empty, empty, b"", empty, empty, empty, ended=ended, generation=generation)
        self.drafting.on_step(step)
        for start in starts:
            self.slots.start(start)
            self.drafting.on_start(start)

    def put(self, slot: int, prompt: list[int], answer: list[int], prediction: tuple[int, ...] = ()) -> None:
        sampling = SamplingParams(prediction_token_ids=int32(*prediction))
        token_ids = int32(*prompt, *answer)
        self.step(SlotStart(slot, "r", token_ids, len(prompt), sampling, b"", max_total_tokens=300))

    def ran(self, slot: int, num_drafts: int, count: int) -> None:
        """Report a step in which the slot had a row with drafts that brought `count` tokens, which are there."""
        one = np.ones(1, np.int32)
        rows = StepRows(one * slot, one, one, one + num_drafts, one * num_drafts)
        self.drafting.verified(rows, one * count)
        self.drafting.propose()

    def draft_tokens(self, slot: int) -> list[int]:
        self.ran(slot, 0, 1)
        return [int(token_id) for token_id in self.slots.drafts[slot, : self.slots.num_drafts[slot]]]


def test_most_promising_method_drafts() -> None:
    rig = Rig()
    answer = [40, 41, 42, 43, 44, 45, 46, 47]
    rig.put(0, [1], answer)
    rig.step(ended=int32(0, 9))
    rig.put(1, [5, 6, 7, 8, 9, 10, 5, 6, 7, 8], [])
    assert rig.draft_tokens(1) == [9, 10, 5, 6], "n-gram finds it in the text itself"
    rig.put(2, [3], [40, 41, 42, 43])
    assert rig.draft_tokens(2) == [44, 45, 46, 47], "suffix in another answer"
    rig.ran(1, 4, 3)
    rig.ran(2, 3, 1)
    assert rig.drafting.take_figures() == [("ngram", 4, 2), ("suffix", 3, 0)]
    assert rig.drafting.take_figures() == []
    assert rig.drafting.num_bytes > 0


def test_remembered_answer_ends_where_the_scheduler_says() -> None:
    """Tokens sampled beyond its end are not part of it."""
    rig = Rig("suffix")
    rig.put(0, [1], [40, 41, 42, 43, 44, 45])
    rig.step(ended=int32(0, 4))
    rig.put(1, [3], [40, 41])
    assert rig.draft_tokens(1) == [42]
    rig.step(ended=int32(2, 50))  # a slot that this worker knows nothing of


def test_clearing_the_prefix_cache_clears_answers() -> None:
    rig = Rig("suffix")
    rig.put(0, [1], [40, 41, 42, 43, 44, 45])
    rig.step(ended=int32(0, 7))
    rig.put(1, [3], [40, 41])
    assert rig.draft_tokens(1) == [42, 43, 44, 45]
    rig.step(generation=1)
    assert rig.draft_tokens(1) == []


def test_prediction_is_searched_first() -> None:
    prompt = [1, 2, 3, 11, 12, 99, 98]
    rig = Rig("ngram")
    rig.put(0, prompt, [], (11, 12, 13, 14, 15, 16))
    assert rig.draft_tokens(0) == [11, 12, 13, 14], "the answer begins as predicted"
    rig.put(0, prompt, [11, 12], (11, 12, 13, 14, 15, 16))
    assert rig.draft_tokens(0) == [13, 14, 15, 16], "not as in the prompt"
    rig.put(0, prompt, [11, 12, 77, 14, 15], (11, 12, 13, 14, 15, 16))
    assert rig.draft_tokens(0) == [16], "behind a token that was replaced"
    rig.put(0, prompt, [60, 61, 62, 63, 64, 11, 12], (11, 12, 13, 14, 15, 16))
    assert rig.draft_tokens(0) == [13, 14, 15, 16]
    rig.put(0, prompt, [60, 61, 62, 63, 64, 2, 3], (11, 12, 13))
    assert rig.draft_tokens(0) == [11, 12, 99, 98], "then in the text itself"
    rig.put(0, prompt, [11, 12])
    assert rig.draft_tokens(0) == [99, 98, 11, 12], "nothing is left of the prediction of the sequence before"


class OneTokenDrafter:
    """Drafter of one wrong token for each requested slot; with layers, or without."""

    num_bytes = 0
    priors = np.array([0.5])

    def __init__(self, *, needs_hidden: bool) -> None:
        self.needs_hidden = needs_hidden

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None: ...
    def stop(self, slot: int, token_ids: np.ndarray) -> None: ...
    def known(self, slots: np.ndarray, counts: np.ndarray) -> None: ...
    def forget(self) -> None: ...

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        found = Drafts.empty(len(slots), K)
        found.counts[:] = 1
        return found


def test_resting_slots_are_skipped_until_a_retry() -> None:
    """Resting slots are skipped only if all drafts come from layers; other methods may find something at any time, and are
    asked in each sixteenth step."""
    num_looks = []
    for needs_hidden in (True, False):
        slots, one = BatchSlots(np.zeros((1, 4, 4), np.int32), 9, 1000, K), np.ones(1, np.int32)
        drafting = Drafting({"mtp": OneTokenDrafter(needs_hidden=needs_hidden)}, slots, OneRank(), is_adaptive=True)
        coming, have_looked = deque([b"", b""]), []
        for number in range(3000):
            granted = coming.popleft()
            drafting.on_step(Step(number, [], b"", b"", b"", b"", b"", b"", b"", num_drafts=granted))
            drafts = drafting.choose_drafts(one, np.frombuffer(granted, np.int32), 1, 1) if granted else one * 0
            coming.append(drafting.verified(StepRows(one, one, one + drafts, one + drafts, drafts), one)[0])
            have_looked.append(not drafting.has_skipped)
            if have_looked[-1]:
                drafting.propose()
                drafting.learn_time(1 + int(drafts[0]), 2_000_000 if drafts[0] else 1_000_000)
        num_looks.append(sum(have_looked[2000:]))  # doubts are raised before
    assert num_looks[0] < 40 < 1000 / 16 < num_looks[1]


@pytest.mark.parametrize("method", ["ngram", "suffix", "ngram,suffix"])
def test_remembered_answers_fit_the_memory_left(method: str) -> None:
    """The bound holds for any texts; the KV cache is that much smaller."""
    rng, length = np.random.default_rng(4), 2000
    config = SpeculativeConfig(method=method, num_speculative_tokens=K)
    texts = [rng.integers(0, most, length) for most in (2, 3, 20, 999)] + [np.arange(length) % size for size in (1, 7, 500)]
    found = []
    for text in texts:
        slots = BatchSlots(np.zeros((1, 3, 4), np.int32), length + 10, 3000, K)
        drafting = make_drafting(config, slots)
        assert drafting is not None
        at_first = drafting.num_bytes
        start = SlotStart(1, "r", int32(*text[:-1]), length - 1, SamplingParams(), b"", max_total_tokens=length + 9)
        slots.start(start)
        drafting.on_start(start)
        one = np.ones(1, np.int32)
        slots.append(one, one * (length - 1), one * int(text[-1]))
        for _ in range(20):
            drafting.verified(StepRows(one, one, one, one, one * 0), one)
            drafting.propose()
        found.append(drafting.num_bytes - at_first)
    of_token = config.index_bytes[1]
    assert of_token * length / 4 < max(found) <= of_token * length
