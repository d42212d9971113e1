"""The suffix trees compared with counting in plain Python, remembered answers, and their bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SUFFIX_SHARED_BYTES, SpeculativeConfig
from engine.messages import SamplingParams, SlotStart
from tests.workers.serving import swap_slots
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.suffix import SuffixDrafter

K = 8
NONE = np.zeros(0, np.int32)


class Rig:
    """BatchSlots and a drafter for them."""

    def __init__(self, depth: int = 6, shared_bytes: int = SUFFIX_SHARED_BYTES, **options: float) -> None:
        named = {f"suffix_decoding_{name}": value for name, value in options.items()}
        self.config = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=depth, **named)  # type: ignore[arg-type]
        self.slots = BatchSlots(np.zeros((1, 5, 4), np.int32), 5000, 1000, K)
        self.drafter = SuffixDrafter(self.config, self.slots, shared_bytes)

    def put(self, slot: int, prompt: list[int], answer: list[int]) -> None:
        token_ids = np.array(prompt + answer, np.int32)
        self.slots.start(SlotStart(slot, "r", token_ids.tobytes(), len(prompt), SamplingParams(), b""))
        self.drafter.start(slot, token_ids, len(prompt), NONE)

    def say(self, slot: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.slots.append(np.array([slot]), self.slots.num_tokens[[slot]], np.array([token_id]))

    def complete(self, slot: int) -> None:
        self.drafter.stop(slot, self.slots.token_ids[slot, : self.slots.num_tokens[slot]])

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        self.put(3, prompt, answer)
        self.complete(3)
        self.drafter.known(NONE, NONE)

    def draft_tokens(self, slot: int, most: int = K) -> list[int]:
        which = np.array([slot], np.int32)
        self.drafter.known(which, which)
        found = self.drafter.propose(which, np.full(1, most, np.int32))
        return [int(token_id) for token_id in found.token_ids[0, : found.counts[0]]]


def followers(texts: list[list[int]], part: list[int]) -> tuple[int | None, float]:
    """Return the token that followed `part` most often in texts, the latest of several, and its share."""
    counts: Counter[int] = Counter()
    last: dict[int, tuple[int, int]] = {}
    for index, text in enumerate(texts):
        for end in range(len(part), len(text)):
            if text[end - len(part) : end] == part:
                counts[text[end]] += 1
                last[text[end]] = index, end
    if not counts:
        return None, 0.0
    best = max(counts, key=lambda token: (counts[token], last[token]))
    return best, counts[best] / counts.total()


def expected(rig: Rig, trees: list[list[list[int]]], text: list[int]) -> list[int]:
    """Return the expected draft by counting all parts of all texts of each tree."""
    config = rig.config
    best, best_promise = [], 0.0
    for texts in trees:
        for size in range(min(len(text), config.suffix_decoding_max_tree_depth - 1), 0, -1):
            match, draft = text[len(text) - size :], []
            chance, promise = 1.0, 0.0
            while len(draft) < min(K, int(config.suffix_decoding_max_spec_factor * size)):
                if len(match) + len(draft) >= config.suffix_decoding_max_tree_depth:
                    break
                token, share = followers(texts, match + draft)
                chance *= share
                if token is None or chance < config.suffix_decoding_min_token_prob:
                    break
                draft.append(token)
                promise += chance
            if promise > best_promise:
                best, best_promise = draft, promise
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([0.1, 0.5]))
def test_drafts_equal_those_by_counting(seed: int, num_words: int, factor: float, chance: float) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(max_spec_factor=factor, min_token_prob=chance)
    answers: list[list[int]] = []
    for _ in range(rng.integers(0, 4)):
        answers.append(rng.integers(1, 1 + num_words, rng.integers(2, 30)).tolist())
        rig.answered([999], answers[-1])
    text = rng.integers(1, 1 + num_words, rng.integers(1, 40)).tolist()
    rig.put(0, text[:1], text[1:])
    for _ in range(6):
        assert rig.draft_tokens(0) == expected(rig, [[text], answers], text)
        more = rng.integers(1, 1 + num_words, rng.integers(1, 4)).tolist()
        rig.say(0, more)
        text = text + more
        if rng.integers(0, 3) == 0:
            answers.append(rng.integers(1, 1 + num_words, 12).tolist())
            rig.answered([998], answers[-1])


def test_draft_is_no_longer_than_the_repeated_text() -> None:
    rig = Rig(depth=24)
    rig.put(1, [1, 2, 3, 4, 5, 6, 7], [2, 3])
    assert rig.draft_tokens(1) == [4, 5]
    rig.say(1, [4, 5])
    assert rig.draft_tokens(1) == [6, 7, 2, 3]
    assert rig.draft_tokens(1, 3) == [6, 7, 2]


def test_completed_answers_are_found_until_forgotten() -> None:
    rig = Rig(depth=16, max_spec_factor=3.0)
    answer = list(range(20, 40))
    rig.put(2, [5, 6], answer)
    rig.put(1, [7], [20, 21])
    assert rig.draft_tokens(1) == []
    rig.complete(2)
    rig.complete(2)
    assert (rig.draft_tokens(1), rig.drafter._trees.num_texts) == ([22, 23, 24, 25, 26, 27], 1)
    rig.put(1, [6], [])
    assert rig.draft_tokens(1) == [], "prompts are not remembered"
    rig.put(1, [7], [20, 21])
    rig.drafter.forget()
    assert (rig.draft_tokens(1), rig.drafter._trees.num_texts) == ([], 0)


def test_slot_forgets_the_previous_sequence() -> None:
    rig = Rig()
    rig.put(2, [1, 2, 3, 4, 1, 2], [])
    assert rig.draft_tokens(2) == [3, 4]
    rig.put(2, [8, 1, 2], [])
    assert rig.draft_tokens(2) == []
    rig.slots.reset(2)
    assert rig.draft_tokens(2) == []


@pytest.mark.parametrize("most", [0, 1, 2, 5, 8])
def test_number_of_answers_is_bounded(most: int) -> None:
    rig = Rig(max_cached_requests=most)
    for index in range(30):
        rig.answered([1], [100 + 3 * index, 101 + 3 * index, 102 + 3 * index])
        assert rig.drafter._trees.num_texts <= most
    rig.put(0, [1], [187])
    assert rig.draft_tokens(0) == ([188] if most else []), "the last one is remembered"


def test_bytes_are_bounded() -> None:
    rng, most = np.random.default_rng(1), 1 << 20
    rig = Rig(depth=24, shared_bytes=most)
    rig.put(3, [1], [])
    at_first = rig.drafter.num_bytes
    for _ in range(60):
        rig.answered([1], rng.integers(0, 999, 300).tolist())
    assert most // 8 < rig.drafter.num_bytes - at_first <= most
    assert 0 < rig.drafter._trees.num_texts < 60


def test_long_texts_are_indexed_over_several_steps() -> None:
    """A prompt and a completed answer: the part that a step indexes is bounded, however repetitive the text is."""
    rng = np.random.default_rng(2)
    for text in (rng.integers(0, 900, 4500).tolist(), [7] * 900):
        rig = Rig(depth=24, max_spec_factor=4.0)
        rig.put(0, [*text, *text[:10]], [])
        found = [len(rig.draft_tokens(0)) for _ in range(12)]
        assert found[0] == 0 < found[-1] == K
        rig = Rig(depth=24, max_spec_factor=4.0)
        rig.put(3, [1], [*text, *range(901, 921)])
        rig.complete(3)
        rig.put(0, [1], [*range(901, 905)])
        counts = [len(rig.draft_tokens(0)) for _ in range(12)]
        assert counts[0] == 0 < counts[-1] == K
        assert rig.drafter._trees.num_texts == 1


def test_no_slot_waits_for_earlier_slots() -> None:
    """A step may bring any number of tokens to all of them."""
    num_slots, num_new = 64, 9
    slots = BatchSlots(np.zeros((1, num_slots + 1, 4), np.int32), 2000, 1000, K)
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"), slots)
    which = np.arange(num_slots, dtype=np.int32)
    for slot in range(num_slots):
        token_ids = np.array([slot], np.int32)
        slots.start(SlotStart(slot, "r", token_ids.tobytes(), 1, SamplingParams(), b""))
        drafter.start(slot, token_ids, 1, NONE)
    for _ in range(40):
        for _ in range(num_new):
            slots.append(which, slots.num_tokens[which], slots.num_tokens[which] % 10)
        drafter.known(which, which)
    assert (drafter.propose(which, np.full(num_slots, K, np.int32)).counts > 0).all()


def test_swapped_slots_keep_their_index() -> None:
    rig = Rig()
    rig.put(0, [1, 2, 3, 4, 1, 2], [])
    rig.put(1, [5, 6, 7, 5], [])
    swap_slots(rig.slots, 0, 1)
    assert (rig.draft_tokens(1), rig.draft_tokens(0)) == ([3, 4], [6])
