"""The n-gram index compared with a plain search, and its drafts for texts that repeat themselves with changes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams, SlotStart
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.ngram import NgramDrafter

K = 4
NONE = np.zeros(0, np.int32)


def slots_of(num_slots: int = 3, length: int = 5000) -> BatchSlots:
    return BatchSlots(np.zeros((1, num_slots + 1, 4), np.int32), length, 1000, K)


def drafter_of(slots: BatchSlots, least: int = 2, most: int = 5) -> NgramDrafter:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=K, prompt_lookup_min=least, prompt_lookup_max=most)
    return NgramDrafter(config, slots)


def put(slots: BatchSlots, drafter: NgramDrafter, slot: int, tokens: list[int]) -> None:
    token_ids = np.array(tokens, np.int32)
    slots.start(SlotStart(slot, "r", token_ids.tobytes(), len(tokens), SamplingParams(), b""))
    drafter.start(slot, token_ids, len(tokens), NONE)


def say(slots: BatchSlots, slot: int, token_id: int) -> None:
    place = np.array([slots.num_tokens[slot]])
    slots.append(np.array([slot]), place, np.array([token_id]))


def draft_tokens(slots: BatchSlots, drafter: NgramDrafter, slot: int, num_calls: int = 4) -> list[int]:
    """Return draft tokens after `num_calls` steps, in which long texts are indexed."""
    which = np.array([slot], np.int32)
    for _ in range(num_calls):
        drafter.known(which, which)
    found = drafter.propose(which, np.full(1, K, np.int32))
    return found.token_ids[0, : found.counts[0]].tolist()


def longest(tokens: list[int], least: int, most: int) -> int:
    """Return how many of the last tokens occurred together before."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        last = tokens[-size:]
        if any(tokens[place : place + size] == last for place in range(len(tokens) - size)):
            return size
    return 0


@pytest.mark.parametrize("seed", range(4))
def test_drafts_continue_the_longest_match(seed: int) -> None:
    """The draft token in fresh slots is the one after the longest match."""
    rng = np.random.default_rng(seed)
    for size in (1, 2, 3, 10, 50, 200, 700):
        tokens = rng.integers(0, 3 + 2 * seed, size).tolist()
        slots = slots_of()
        drafter = drafter_of(slots)
        put(slots, drafter, 1, tokens)
        found, num_matched = draft_tokens(slots, drafter, 1), longest(tokens, 2, 5)
        assert bool(found) == bool(num_matched)
        if found:
            text = tokens + found
            last = tokens[-num_matched:]
            places = [place for place in range(num_matched, size) if tokens[place - num_matched : place] == last]
            assert any(text[place : place + K] == found for place in places)


def test_overlapping_match_repeats_the_end() -> None:
    slots = slots_of()
    drafter = drafter_of(slots)
    put(slots, drafter, 0, [9, 7, 7, 7])
    assert draft_tokens(slots, drafter, 0) == [7, 7, 7, 7]
    put(slots, drafter, 0, [1, 2, 3, 1, 2])
    assert draft_tokens(slots, drafter, 0) == [3, 1, 2, 3]


def test_match_survives_a_replaced_or_inserted_token() -> None:
    source = list(range(100, 140))
    slots = slots_of()
    drafter = drafter_of(slots)
    put(slots, drafter, 0, [*source, 5, 100, 101, 102])
    assert draft_tokens(slots, drafter, 0) == [103, 104, 105, 106]
    say(slots, 0, 7)  # in place of 103
    assert draft_tokens(slots, drafter, 0) == [104, 105, 106, 107]
    say(slots, 0, 104)
    say(slots, 0, 8)  # put in before 105
    draft_tokens(slots, drafter, 0)
    say(slots, 0, 105)
    assert draft_tokens(slots, drafter, 0) == [106, 107, 108, 109]
    for token_id in (1, 2, 3, 4):
        say(slots, 0, token_id)
    assert draft_tokens(slots, drafter, 0) == []


def test_slot_forgets_the_previous_sequence() -> None:
    slots = slots_of()
    drafter = drafter_of(slots)
    put(slots, drafter, 2, [1, 2, 3, 4, 1, 2])
    assert draft_tokens(slots, drafter, 2) == [3, 4, 1, 2]
    put(slots, drafter, 2, [8, 1, 2])
    assert draft_tokens(slots, drafter, 2) == []
    slots.reset(2)
    assert draft_tokens(slots, drafter, 2) == []


def test_incremental_indexing_equals_indexing_at_once() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 4, 1500).tolist()
    slots = slots_of()
    grown, fresh = drafter_of(slots), drafter_of(slots)
    put(slots, grown, 0, tokens[:2])
    for token_id in tokens[2:]:
        draft_tokens(slots, grown, 0)
        say(slots, 0, token_id)
    assert longest(tokens, 2, 5) == 5
    assert len(draft_tokens(slots, grown, 0)) == len(draft_tokens(slots, fresh, 0)) == K


def test_long_text_is_indexed_over_several_steps() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(10, 1000, 1200).tolist()
    slots = slots_of()
    drafter = drafter_of(slots)
    put(slots, drafter, 0, [*tokens, *tokens[:8]])
    found = [draft_tokens(slots, drafter, 0, num_calls=1) for _ in range(3)]
    assert found == [[], [], tokens[8 : 8 + K]]


def test_no_slot_waits_for_earlier_slots() -> None:
    """A step may bring any number of tokens to all of them."""
    slots = slots_of(64)
    drafter = drafter_of(slots)
    which = np.arange(64, dtype=np.int32)
    for slot in range(64):
        put(slots, drafter, slot, [slot])
    for _ in range(10):
        for _ in range(17):
            slots.append(which, slots.num_tokens[which], slots.num_tokens[which] % 10)
        drafter.known(which, which)
    assert (drafter.propose(which, np.full(64, K, np.int32)).counts > 0).all()
