"""Prompts with pictures on the runner, with features of transformers' encoders: the golden answers, the same bits with every
way to chunk and batch the work, and no trace of a picture elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.messages import MediaUnit, SamplingParams, Step
from shm.encoder_arena import EncoderArena
from tests.workers.seeing import ARCHITECTURES, hash_of, make_seeing_runner, seeing_samples, store
from tests.workers.serving import GOLDEN, Sample, Serving, golden_cases, int32, make_runner, swap_slots
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


def run_alone(runner: ModelRunner, samples: list[Sample], chunk: int = 512) -> None:
    for sample in samples:
        serving = Serving(runner, chunk=chunk)
        serving.place(sample, 7)
        serving.run([sample])


def run_together(runner: ModelRunner, samples: list[Sample], chunk: int = 512) -> None:
    """Run them in fewer steps."""
    serving = Serving(runner, chunk=chunk)
    for slot, sample in enumerate(samples):
        serving.place(sample, slot)
    serving.run(samples)


def answers(samples: list[Sample]) -> list[tuple[object, ...]]:
    return [sample.answer() for sample in samples]


def text_sample(num_outputs: int = 8) -> Sample:
    return Sample([763, 548, 939, 91, 17], SamplingParams(temperature=0.0, num_logprobs=2), num_outputs)


def test_agrees_with_transformers(architecture: str, seeing: Seeing) -> None:
    """Whole beside each other, and alone in chunks of 16, which end within pictures."""
    runner, arena = seeing
    whole, chunked = (seeing_samples(architecture, arena) for _ in range(2))
    run_together(runner, whole)
    for sample, case in zip(whole, golden_cases(architecture), strict=True):
        assert sample.outputs == case["greedy_token_ids"]
        for (_, values), expected in zip(sample.tops, case["top_logprobs"], strict=True):
            np.testing.assert_allclose(values, [value for _, value in expected], atol=1e-3)
        for position, value in enumerate(case["prompt_logprobs"]):
            assert value is None or sample.prompt_logprobs[position] == pytest.approx(value, abs=1e-3)
    for sample in chunked:
        sample.num_outputs = 4
    run_alone(runner, chunked, chunk=16)
    assert answers(chunked) == [sample.answer(4) for sample in whole]


def test_plans_agree(architecture: str, native: Seeing) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture, plan="eager", threads=2)
    samples, again = seeing_samples(architecture, arena), seeing_samples(architecture, native[1])
    run_alone(runner, samples)
    run_alone(native[0], again)
    assert answers(samples) == answers(again)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_narrow_numbers_give_the_same_bits_in_any_chunks(architecture: str, options: dict[str, Any]) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture, **options)
    found = []
    for chunk in (512, 48, 16, 5, 1):
        samples = seeing_samples(architecture, arena)
        run_alone(runner, samples, chunk)
        found.append(answers(samples))
    assert all(each == found[0] for each in found)


def test_two_pictures_in_one_step_do_not_overwrite_each_other(architecture: str, native: Seeing) -> None:
    """All prompts at once beside text, in shared steps, and elsewhere in the arena."""
    runner, arena = native
    alone = seeing_samples(architecture, arena)
    run_alone(runner, alone)
    for chunk, budget in ((512, 512), (9, 30)):
        together, text = seeing_samples(architecture, arena, first_row=60), text_sample()
        serving = Serving(runner, chunk=chunk, budget=budget)
        for slot, sample in enumerate([together[2], text, together[0], together[1]]):
            serving.place(sample, slot)
        serving.run([*together, text])
        assert answers(together) == answers(alone)


def test_text_step_after_a_picture_step_reads_no_picture(architecture: str, native: Seeing) -> None:
    """A prompt of text alone, before pictures, after them and without an arena."""
    blind = make_runner(GOLDEN / architecture)
    found = []
    for runner in (blind, native[0]):
        for _ in range(2):
            text = text_sample()
            run_alone(runner, [text])
            found.append(text.answer())
            run_alone(native[0], seeing_samples(architecture, native[1])[:1])
    assert all(each == found[0] for each in found)


def test_a_prefix_that_ends_within_a_picture(architecture: str, native: Seeing) -> None:
    """The beginning of a picture is cached, and exactly its other rows are read; the earlier rows may have any content by
    then."""
    runner, arena = native
    whole = seeing_samples(architecture, arena)
    run_alone(runner, whole)
    for index, expected in enumerate(whole):
        serving = Serving(runner)
        first = seeing_samples(architecture, arena)[index]
        first.num_outputs = 1
        serving.place(first, 3)
        serving.run([first])
        units = [(unit.start, unit.start + unit.num_tokens) for unit in first.units]
        for num_blocks in range(1, (len(first.prompt) - 1) // serving.block_size + 1):
            again = seeing_samples(architecture, arena)[index]
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


def test_another_picture_gives_another_answer(architecture: str, native: Seeing) -> None:
    runner, arena = native
    first, second = (seeing_samples(architecture, arena)[0] for _ in range(2))
    run_alone(runner, [first])
    row, count = second.unit_rows[0], second.units[0].num_tokens
    store(arena, row, second.unit_hashes[0], -arena.rows[row : row + count])
    run_alone(runner, [second])
    assert second.prompt_logprobs != first.prompt_logprobs


def start_of(runner: ModelRunner, sample: Sample) -> Step:
    serving = Serving(runner)
    serving.place(sample, 2)
    return serving._message([(sample, len(sample.prompt))])


def test_what_does_not_lie_there_is_not_read(architecture: str, native: Seeing) -> None:
    """A header of another picture, of other weights, of other rows, or none; rows that were never assigned."""
    runner, arena = native
    for change in ("other", "version", "rows", "unfinished", "no rows"):
        sample = seeing_samples(architecture, arena)[0]
        row, count, unit_hash = sample.unit_rows[0], sample.units[0].num_tokens, sample.unit_hashes[0]
        if change == "other":
            arena.publish(row, hash_of("other"), count, 1)
        elif change == "version":
            arena.publish(row, unit_hash, count, 2)
        elif change == "rows":
            arena.publish(row, unit_hash, count - 1, 1)
        elif change == "unfinished":
            arena.begin(row)
        else:
            sample.unit_rows = [-1]
        step = start_of(runner, sample)
        result = runner.run(step)
        assert list(result.missing) == [unit_hash], change
        assert (result.token_ids, result.num_tokens, result.encoded) == (b"", 0, [])
        if change == "no rows":  # they come with the step that is sent again
            step.starts = []
            step.unit_slots, step.unit_indexes, step.unit_rows = int32([2]), int32([0]), int32([row])
        arena.publish(row, unit_hash, count, 1)
        assert runner.run(step).num_tokens == len(sample.prompt)


def test_weights_of_another_version_find_nothing(architecture: str) -> None:
    runner, arena = make_seeing_runner(GOLDEN / architecture)
    sample = seeing_samples(architecture, arena)[0]
    step = start_of(runner, sample)
    runner.load(str(GOLDEN / architecture), 2, lambda num_done, num_bytes: None)
    assert list(runner.run(step).missing) == [sample.unit_hashes[0]]
    store(arena, sample.unit_rows[0], sample.unit_hashes[0], np.zeros((sample.units[0].num_tokens, arena.width), np.float32), 2)
    assert not runner.run(step).missing


def test_a_placeholder_that_is_no_unit_is_text(architecture: str, native: Seeing) -> None:
    """The model's own token for pictures, typed or generated, binds nothing."""
    runner, arena = native
    sample = seeing_samples(architecture, arena)[0]
    bare = Sample(sample.prompt, sample.sampling, 4)
    run_alone(runner, [bare])
    sample.units = (MediaUnit(0, 0, 0, 1, 1, 1),)  # one row elsewhere: the others are text
    assert bare.prompt_logprobs != sample.prompt_logprobs
    assert bare.is_done


def test_slots_that_change_places(architecture: str, native: Seeing) -> None:
    """Prompts and answers with pictures continue in other slots."""
    runner, arena = native
    alone = seeing_samples(architecture, arena)
    run_alone(runner, alone)
    samples = seeing_samples(architecture, arena)
    serving = Serving(runner, chunk=7)
    for slot, sample in enumerate(samples):
        serving.place(sample, slot)
    for first, second in ((0, 1), (1, 2), (0, 9), (2, 0)):
        serving.step(samples)
        swap_slots(runner.slots, first, second)
        for sample in samples:
            sample.slot = {first: second, second: first}.get(sample.slot, sample.slot)
    serving.run(samples)
    assert answers(samples) == answers(alone)


def spans_of(sample: Sample) -> np.ndarray:
    """Return bounds with which the tokens of a picture see all of it."""
    bounds = np.stack([np.zeros(len(sample.prompt)), np.arange(len(sample.prompt))], axis=1).astype(np.int32)
    for unit in sample.units:
        bounds[unit.start : unit.start + unit.num_tokens, 1] = unit.start + unit.num_tokens - 1
    return bounds


def test_masks(architecture: str, seeing: Seeing) -> None:
    """Pictures that see all of themselves give another answer, the same in chunks that leave them whole and in a batch; bounds
    that equal the causal ones give the plain one."""
    runner, arena = seeing
    plain = seeing_samples(architecture, arena)
    run_together(runner, plain)
    found = []
    for chunk in (512, 24):
        bounded = seeing_samples(architecture, arena)
        for sample in bounded:
            sample.mask_bounds = spans_of(sample).tobytes()
        serving = Serving(runner, chunk=chunk)
        for slot, sample in enumerate(bounded):
            serving.place(sample, slot)
        if chunk < 512:  # ends are where no span is cut
            for sample in bounded:
                cut_at_units(serving, sample)
        serving.run(bounded)
        found.append(answers(bounded))
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], answers(plain), strict=True))
    causal = seeing_samples(architecture, arena)
    for sample in causal:
        bounds = spans_of(sample)
        bounds[:, 1] = np.arange(len(bounds))
        sample.mask_bounds = bounds.tobytes()
    run_together(runner, causal, chunk=11)
    assert answers(causal) == answers(plain)


def cut_at_units(serving: Serving, sample: Sample) -> None:
    """Run the prompt up to the end of its last picture, in chunks that end after each picture."""
    for unit in sample.units:
        serving.chunk = unit.start + unit.num_tokens - sample.num_computed
        serving.step([sample])
    serving.chunk = 5
