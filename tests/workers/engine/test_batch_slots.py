"""Every per-slot array is registered and reset; a batch with two swapped slots runs the same."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.config import SpeculativeConfig
from engine.messages import MediaUnit, SamplingParams, SlotStart, Step
from engine.scheduler.results import finish_reason_of
from tests.engine.scheduler.sequences import make_sample
from tests.workers.serving import GOLDEN, ServedSequence, Serving, int32, make_runner, swap_slots
from workers.engine.batch_slots import BatchSlots
from workers.engine.rows import StepRows
from workers.engine.runner import ModelRunner
from workers.extensions.media.prompt_media import MediaSlots
from workers.sampling.slot_sampling import SlotSampling

NUM_SLOTS = 5


class Parts:
    """Slots with all arrays that extensions and sampling register."""

    def __init__(self, slots: BatchSlots) -> None:
        self.slots, self.media, self.sampling = slots, MediaSlots(slots), SlotSampling(slots)


def empty_parts() -> Parts:
    return Parts(BatchSlots(np.zeros((1, NUM_SLOTS + 1, 4), np.int32), 20, 100, max_drafts=2, hidden_size=3))


def empty_slots() -> BatchSlots:
    return empty_parts().slots


def filled_slots() -> BatchSlots:
    return filled_parts().slots


def filled_parts() -> Parts:
    """Return slots with different contents in every array."""
    parts = empty_parts()
    slots = parts.slots
    for slot in range(NUM_SLOTS):
        tokens = range(10 * slot + 1, 10 * slot + 5)
        sampling = SamplingParams(seed=slot, num_prompt_logprobs=1 if slot % 2 else -1)
        blocks = int32([slot + 1, slot + 7])
        start = SlotStart(slot, f"r{slot}", int32(tokens), slot + 1, sampling, blocks, wants_prompt_logprobs=slot % 2 == 1)
        start.units, start.unit_hashes = (MediaUnit(0, 0, 0, slot + 1, 1, slot + 1),), (bytes([slot]) * 32,)
        start.mask_bounds = int32(bound for place in range(slot + 1) for bound in (place // 2, slot))
        slots.start(start)
        slots.hidden[slot], slots.hidden_positions[slot], slots.entry_ends[slot] = slot + 1, slot + 1, slot + 2
        for name in ("drafts", "draft_classes", "draft_chances", "num_drafts", "draft_trusts", "draft_certainties"):
            getattr(slots, name)[slot] = slot + 1
        slots.num_rested[slot], slots.draft_pauses[slot], slots.is_drafted_by_layers[slot] = slot + 1, slot + 16, slot % 2
    return parts


def test_media_rows_are_set_and_cleared() -> None:
    media = filled_parts().media
    media.set_unit_rows(np.array([1, 3]), np.array([0, 0]), np.array([40, 7]))
    assert [media.prompts[slot].rows.tolist() for slot in range(NUM_SLOTS)] == [[-1], [40], [-1], [7], [-1]]
    media.set_unit_rows(np.array([3]), np.array([0]), np.array([-1]))
    assert media.prompts[3].rows.tolist() == [-1]


@pytest.mark.parametrize("bounds", [[0, 0, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0]], ids=str)
def test_invalid_mask_bounds_fail(bounds: list[int]) -> None:
    start = SlotStart(2, "r", int32([1, 2]), 2, SamplingParams(), b"", mask_bounds=int32(bounds))
    with pytest.raises(AssertionError, match=r"token|bounds of 1 tokens for a prompt of 2"):
        filled_slots().start(start)


def contents(slots: BatchSlots) -> dict[str, list[object]]:
    return {name: array.tolist() for name, array in slots.arrays()}


def test_every_slot_array_is_registered() -> None:
    parts = filled_parts()
    slots, owners = parts.slots, (parts.slots, parts.media, parts.sampling)
    attributes = {id(value) for owner in owners for value in vars(owner).values() if isinstance(value, np.ndarray)}
    assert attributes == {id(array) for _, array in slots.arrays()}
    assert all(len(array) == NUM_SLOTS for _, array in slots.arrays())


@given(st.integers(0, NUM_SLOTS - 1), st.integers(0, NUM_SLOTS - 1))
def test_swapping_twice_restores_the_slots(first: int, second: int) -> None:
    slots = filled_slots()
    before = contents(slots)
    swap_slots(slots, first, second)
    for name, values in contents(slots).items():
        expected = list(before[name])
        expected[first], expected[second] = expected[second], expected[first]
        assert values == expected, name
    swap_slots(slots, first, second)
    assert contents(slots) == before


@given(st.integers(0, NUM_SLOTS - 1))
def test_reset_clears_one_slot(slot: int) -> None:
    slots, empty = filled_slots(), contents(empty_slots())
    before = contents(slots)
    slots.reset(slot)
    for name, values in contents(slots).items():
        assert values == [*before[name][:slot], empty[name][slot], *before[name][slot + 1 :]], name


def test_start_clears_the_previous_sequence() -> None:
    slots = filled_slots()
    slots.start(SlotStart(2, "new", int32([9]), 1, SamplingParams(), int32([])))
    fresh = empty_slots()
    fresh.start(SlotStart(2, "new", int32([9]), 1, SamplingParams(), int32([])))
    for name, array in slots.arrays():
        if name not in ("sampling", "draft_states", "num_starts"):  # an address; any free one; counts sequences
            np.testing.assert_array_equal(array[2], dict(fresh.arrays())[name][2], err_msg=name)
    slots.start(SlotStart(2, "newer", int32([9]), 1, SamplingParams(), int32([])))
    assert slots.num_starts[2] == 2 + filled_slots().num_starts[2]


@pytest.mark.parametrize("token_id", [-1, 100])
def test_token_outside_the_vocabulary_fails(token_id: int) -> None:
    with pytest.raises(AssertionError, match=f"token id {token_id} is outside the vocabulary of 100"):
        filled_slots().start(SlotStart(0, "r", int32([1, token_id]), 2, SamplingParams(), int32([1])))


def test_unknown_token_ids_in_parameters_are_dropped() -> None:
    parts = filled_parts()
    sampling = SamplingParams(
        logit_bias={5: 1.0, 400: 2.0}, allowed_token_ids=[-1, 7, 100], stop_token_ids=[101], bad_words_token_ids=[[3, 200], [4]]
    )
    parts.slots.start(SlotStart(0, "r", int32([1]), 1, sampling, int32([])))
    kept = parts.sampling.records[0]
    assert [int(kept[name]) for name in ("num_biases", "num_allowed", "num_stops", "num_words")] == [1, 1, 0, 1]
    bias = int(np.float32(1.0).view(np.int32))
    assert parts.sampling.token_lists[0].tolist() == [5, bias, 7, 0, 1, 4]
    assert kept["lists"] == parts.sampling.token_lists[0].ctypes.data


STOPS = st.lists(st.integers(0, 120), max_size=3)  # some of no token of the vocabulary


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), STOPS, st.integers(0, 5), st.booleans(), st.booleans())
def test_slot_ends_at_the_schedulers_stop_token(
    drawn: list[int], stops: list[int], min_tokens: int, is_allowed: bool, has_biases: bool
) -> None:
    """Tokens come one or several at a time, and any lists may precede the stop tokens in memory."""
    sampling = SamplingParams(
        stop_token_ids=[*stops, drawn[-1]] if is_allowed else stops,
        min_tokens=min_tokens,
        allowed_token_ids=list(range(90)) if is_allowed else [],
        logit_bias={3: 1.0, 4: -1.0} if has_biases else {},
    )
    sequence = make_sample("r", [1, 2], max_tokens=50)
    sequence.request = replace(sequence.request, sampling=sampling)
    parts, own = empty_parts(), np.ones(len(drawn), np.int32)
    slots = parts.slots
    slots.start(SlotStart(1, "r", int32([1, 2]), 2, sampling, int32([])))
    ends = []
    for token_id in drawn:
        sequence.token_ids.append(token_id)
        ends.append(finish_reason_of(sequence) == "stop")
    parts.sampling.append(own, 2 + np.arange(len(drawn)), np.array(drawn))
    assert slots.is_ended.tolist() == [False, any(ends), False, False, False]
    slots.start(SlotStart(1, "r", int32([1, 2]), 2, sampling, int32([])))
    for number, token_id in enumerate(drawn):
        parts.sampling.append(own[:1], np.array([2 + number]), np.array([token_id]))
        assert slots.is_ended[1] == any(ends[: number + 1])


def test_row_after_a_stop_token_is_skipped() -> None:
    """The scheduler did not know of it yet, with drafts in flight or without; rows of other slots run."""
    parts = empty_parts()
    slots = parts.slots
    for slot in (1, 2):
        sampling = SamplingParams(stop_token_ids=[9])
        slots.start(SlotStart(slot, "r", int32([5, 6]), 2, sampling, int32([1]), max_total_tokens=20))
        parts.sampling.append(np.array([slot], np.int32), np.array([2]), np.array([9 if slot == 1 else 8]))
    columns = int32([1, 2]), int32([2, 2]), int32([1, 1]), bytes([1, 1]), b"", b"", b""
    for step in (Step(7, [], *columns), Step(7, [], *columns, is_following=bytes([1, 1]), num_drafts=int32([0, 0]))):
        rows = StepRows.of(step, slots)
        assert (rows.counts.tolist(), rows.num_sampled.tolist()) == ([0, 1], [0, 1])


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_swapped_slots_give_the_same_answers(swaps: list[tuple[int, int]]) -> None:
    """Sequences swap slots in the middle of their answers; the answers do not change."""
    assert answers(swaps, "qwen3") == answers([], "qwen3")


@settings(max_examples=3)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_swapped_slots_with_drafts_give_the_same_answers(swaps: list[tuple[int, int]]) -> None:
    """All methods; each row brings as many tokens as without a swap."""
    assert answers(swaps, "deepseek_v3", "ngram,suffix,mtp") == answers([], "deepseek_v3", "ngram,suffix,mtp")


@cache
def runner(model: str, method: str) -> ModelRunner:
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=3, adaptive=False) if method else SpeculativeConfig()
    return make_runner(GOLDEN / model, max_model_len=64, max_num_seqs=6, num_kv_blocks=40, speculative_config=drafts)


def answers(swaps: list[tuple[int, int]], model: str, method: str = "") -> tuple[list[tuple[object, ...]], list[int]]:
    """Return the answers, and the number of tokens that rows brought."""
    slots, serving = runner(model, method).slots, Serving(runner(model, method))
    sequences = [
        ServedSequence(list(range(5 + index, 12 + 3 * index)), SamplingParams(temperature=1.0, seed=index, num_logprobs=2), 8)
        for index in range(5)
    ]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    for first, second in swaps:
        serving.step([sequence for sequence in sequences if not sequence.is_done])
        swap_slots(slots, first, second)
        for sequence in sequences:
            sequence.slot = {first: second, second: first}.get(sequence.slot, sequence.slot)
    serving.run(sequences)
    return [sequence.answer() for sequence in sequences], sorted(serving.num_tokens_of_rows)
