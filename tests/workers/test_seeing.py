"""Prompts with pictures on the runner, with features of transformers' encoders: the golden answers, the same bits with every
way to chunk and batch the work, and no trace of a picture elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.messages import MediaUnit, SamplingParams, Step
from shm.encoder_arena import EncoderArena
from tests.workers.seeing import ARCHITECTURES, cut_at_units, hash_of, make_seeing_runner, picture_sequences, store
from tests.workers.serving import GOLDEN, ServedSequence, Serving, golden_cases, int32, make_runner, swap_slots
from workers.engine.runner import ModelRunner

BACKENDS = {"reference": {"ops": "reference", "plan": "eager"}, "op by op": {"plan": "eager"}, "native": {"threads": 2}}
Seeing = tuple[ModelRunner, EncoderArena]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=BACKENDS)
def seeing(architecture: str, request: pytest.FixtureRequest) -> Seeing:
    return make_seeing_runner(GOLDEN / architecture, **BACKENDS[request.param])


@pytest.fixture(scope="module")
def native(architecture: str) -> Seeing:
    return make_seeing_runner(GOLDEN / architecture)


def run_alone(runner: ModelRunner, sequences: list[ServedSequence], chunk: int = 512) -> None:
    for sequence in sequences:
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 7)
        serving.run([sequence])


def run_together(runner: ModelRunner, sequences: list[ServedSequence], chunk: int = 512) -> None:
    """Run them in fewer steps."""
    serving = Serving(runner, chunk=chunk)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)


def answers(sequences: list[ServedSequence]) -> list[tuple[object, ...]]:
    return [sequence.answer() for sequence in sequences]


def text_sequence(num_outputs: int = 8) -> ServedSequence:
    return ServedSequence([763, 548, 939, 91, 17], SamplingParams(temperature=0.0, num_logprobs=2), num_outputs)


def test_vision_models_agree_with_transformers(architecture: str, seeing: Seeing) -> None:
    """Whole beside each other, and alone in chunks of 16, which end within pictures."""
    runner, arena = seeing
    whole, chunked = (picture_sequences(architecture, arena) for _ in range(2))
    run_together(runner, whole)
    for sequence, case in zip(whole, golden_cases(architecture), strict=True):
        assert sequence.outputs == case["greedy_token_ids"]
        for (_, values), expected in zip(sequence.tops, case["top_logprobs"], strict=True):
            np.testing.assert_allclose(values, [value for _, value in expected], atol=1e-3)
        for position, value in enumerate(case["prompt_logprobs"]):
            assert value is None or sequence.prompt_logprobs[position] == pytest.approx(value, abs=1e-3)
    for sequence in chunked:
        sequence.num_outputs = 4
    run_alone(runner, chunked, chunk=16)
    assert answers(chunked) == [sequence.answer(4) for sequence in whole]


def test_plans_agree_on_pictures(architecture: str, native: Seeing) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture, plan="eager", threads=2)
    sequences, again = picture_sequences(architecture, arena), picture_sequences(architecture, native[1])
    run_alone(runner, sequences)
    run_alone(native[0], again)
    assert answers(sequences) == answers(again)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_narrow_types_keep_the_bits_in_chunks(architecture: str, options: dict[str, Any]) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture, **options)
    found = []
    for chunk in (512, 48, 16, 5, 1):
        sequences = picture_sequences(architecture, arena)
        run_alone(runner, sequences, chunk)
        found.append(answers(sequences))
    assert all(each == found[0] for each in found)


def test_pictures_of_one_step_stay_separate(architecture: str, native: Seeing) -> None:
    """All prompts at once beside text, in shared steps, and elsewhere in the arena."""
    runner, arena = native
    alone = picture_sequences(architecture, arena)
    run_alone(runner, alone)
    for chunk, budget in ((512, 512), (9, 30)):
        together, text = picture_sequences(architecture, arena, first_row=60), text_sequence()
        serving = Serving(runner, chunk=chunk, budget=budget)
        for slot, sequence in enumerate([together[2], text, together[0], together[1]]):
            serving.place(sequence, slot)
        serving.run([*together, text])
        assert answers(together) == answers(alone)


def test_text_step_reads_no_picture(architecture: str, native: Seeing) -> None:
    """A prompt of text alone, before pictures, after them and without an arena."""
    blind = make_runner(GOLDEN / architecture)
    found = []
    for runner in (blind, native[0]):
        for _ in range(2):
            text = text_sequence()
            run_alone(runner, [text])
            found.append(text.answer())
            run_alone(native[0], picture_sequences(architecture, native[1])[:1])
    assert all(each == found[0] for each in found)


def test_prefix_can_end_within_a_picture(architecture: str, native: Seeing) -> None:
    """The beginning of a picture is cached, and exactly its other rows are read; the earlier rows may have any content by
    then."""
    runner, arena = native
    whole = picture_sequences(architecture, arena)
    run_alone(runner, whole)
    for index, expected in enumerate(whole):
        serving = Serving(runner)
        first = picture_sequences(architecture, arena)[index]
        first.num_outputs = 1
        serving.place(first, 3)
        serving.run([first])
        units = [(unit.start, unit.start + unit.num_tokens) for unit in first.units]
        for num_blocks in range(1, (len(first.prompt) - 1) // serving.block_size + 1):
            again = picture_sequences(architecture, arena)[index]
            again.prompt_logprobs = dict(first.prompt_logprobs)
            cut = num_blocks * serving.block_size
            if all(end <= cut or start >= cut for start, end in units):
                continue
            for (start, _), row in zip(units, again.unit_rows, strict=True):
                arena.rows[row : row + max(0, cut - start)] = np.nan
            serving.place(again, 4, cached_blocks=first.block_ids[:num_blocks])
            serving.run([again])
            assert again.answer() == expected.answer()
            break
        else:
            pytest.fail("no block ends within a picture of this prompt")


def test_answer_depends_on_the_picture(architecture: str, native: Seeing) -> None:
    runner, arena = native
    first, second = (picture_sequences(architecture, arena)[0] for _ in range(2))
    run_alone(runner, [first])
    row, count = second.unit_rows[0], second.units[0].num_tokens
    store(arena, row, second.unit_hashes[0], -arena.rows[row : row + count])
    run_alone(runner, [second])
    assert second.prompt_logprobs != first.prompt_logprobs


def start_of(runner: ModelRunner, sequence: ServedSequence) -> Step:
    serving = Serving(runner)
    serving.place(sequence, 2)
    return serving._message([(sequence, len(sequence.prompt))])


def test_missing_features_are_not_read(architecture: str, native: Seeing) -> None:
    """A header of another picture, of other weights, of other rows, or none; rows that were never assigned."""
    runner, arena = native
    for change in ("other", "version", "rows", "unfinished", "no rows"):
        sequence = picture_sequences(architecture, arena)[0]
        row, count, unit_hash = sequence.unit_rows[0], sequence.units[0].num_tokens, sequence.unit_hashes[0]
        if change == "other":
            arena.publish(row, hash_of("other"), count, 1)
        elif change == "version":
            arena.publish(row, unit_hash, count, 2)
        elif change == "rows":
            arena.publish(row, unit_hash, count - 1, 1)
        elif change == "unfinished":
            arena.begin(row)
        else:
            sequence.unit_rows = [-1]
        step = start_of(runner, sequence)
        result = runner.run(step)
        assert list(result.missing) == [unit_hash], change
        assert (result.token_ids, result.num_tokens, result.encoded) == (b"", 0, [])
        if change == "no rows":  # they arrive with the repeated step
            step.starts = []
            step.unit_slots, step.unit_indexes, step.unit_rows = int32([2]), int32([0]), int32([row])
        arena.publish(row, unit_hash, count, 1)
        assert runner.run(step).num_tokens == len(sequence.prompt)


def test_features_of_other_weights_are_not_found(architecture: str) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture)
    sequence = picture_sequences(architecture, arena)[0]
    step = start_of(runner, sequence)
    runner.load(str(GOLDEN / architecture), 2, lambda num_done, num_bytes: None)
    assert list(runner.run(step).missing) == [sequence.unit_hashes[0]]
    store(
        arena,
        sequence.unit_rows[0],
        sequence.unit_hashes[0],
        np.zeros((sequence.units[0].num_tokens, arena.width), np.float32),
        2,
    )
    assert not runner.run(step).missing


def test_placeholder_without_a_unit_is_text(architecture: str, native: Seeing) -> None:
    """The model's own token for pictures, typed or generated, binds nothing."""
    runner, arena = native
    sequence = picture_sequences(architecture, arena)[0]
    bare = ServedSequence(sequence.prompt, sequence.sampling, 4)
    run_alone(runner, [bare])
    sequence.units = (MediaUnit(0, 0, 0, 1, 1, 1),)  # one row elsewhere: the others are text
    assert bare.prompt_logprobs != sequence.prompt_logprobs
    assert bare.is_done


def test_swapped_slots_keep_their_pictures(architecture: str, native: Seeing) -> None:
    """Prompts and answers with pictures continue in other slots."""
    runner, arena = native
    alone = picture_sequences(architecture, arena)
    run_alone(runner, alone)
    sequences = picture_sequences(architecture, arena)
    serving = Serving(runner, chunk=7)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    for first, second in ((0, 1), (1, 2), (0, 9), (2, 0)):
        serving.step(sequences)
        swap_slots(runner.slots, first, second)
        for sequence in sequences:
            sequence.slot = {first: second, second: first}.get(sequence.slot, sequence.slot)
    serving.run(sequences)
    assert answers(sequences) == answers(alone)


def spans_of(sequence: ServedSequence) -> np.ndarray:
    """Return bounds with which the tokens of a picture see all of it."""
    bounds = np.stack([np.zeros(len(sequence.prompt)), np.arange(len(sequence.prompt))], axis=1).astype(np.int32)
    for unit in sequence.units:
        bounds[unit.start : unit.start + unit.num_tokens, 1] = unit.start + unit.num_tokens - 1
    return bounds


def test_bidirectional_pictures_keep_the_bits(architecture: str, seeing: Seeing) -> None:
    """Pictures that see all of themselves give another answer, the same in chunks that leave them whole and in a batch; bounds
    that equal the causal ones give the plain one."""
    runner, arena = seeing
    plain = picture_sequences(architecture, arena)
    run_together(runner, plain)
    found = []
    for chunk in (512, 24):
        bounded = picture_sequences(architecture, arena)
        for sequence in bounded:
            sequence.mask_bounds = spans_of(sequence).tobytes()
        serving = Serving(runner, chunk=chunk)
        for slot, sequence in enumerate(bounded):
            serving.place(sequence, slot)
        if chunk < 512:  # ends fall outside spans
            for sequence in bounded:
                cut_at_units(serving, sequence)
        serving.run(bounded)
        found.append(answers(bounded))
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], answers(plain), strict=True))
    causal = picture_sequences(architecture, arena)
    for sequence in causal:
        bounds = spans_of(sequence)
        bounds[:, 1] = np.arange(len(bounds))
        sequence.mask_bounds = bounds.tobytes()
    run_together(runner, causal, chunk=11)
    assert answers(causal) == answers(plain)
