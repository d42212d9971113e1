"""Drafts change no byte, whether they are right, wrong or random: accepted tokens are those that are sampled anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams, SlotStart, Step
from tests.workers.serving import ARCHITECTURES, GOLDEN, ServedSequence, Serving, int32, make_runner
from workers.engine.batch_slots import BatchSlots
from workers.engine.rows import StepRows

K = 4
Drafting = Callable[[ServedSequence], list[int]]


def sequences() -> list[ServedSequence]:
    """Return one sequence for each way to sample, with repetition in the prompts."""
    rng = np.random.default_rng(5)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "num_logprobs": 3, "num_prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 11, "num_logprobs": 2, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.8, "seed": 12, "top_k": 12, "frequency_penalty": 0.5, "min_tokens": 4, "stop_token_ids": (3, 9)},
        {"temperature": 0.0, "bad_words_token_ids": ((5, 7), (11,)), "logit_bias": {4: 2.0}},
    ]
    prompts = [rng.integers(0, 40, size).tolist() * 2 for size in (3, 9, 20, 40)]
    return [ServedSequence(prompt, SamplingParams(**way), 21) for prompt, way in zip(prompts, ways, strict=True)]


def answers(path: Path, drafter: Drafting | None, *, chunk: int = 512, **options: Any) -> tuple[list[object], float]:
    """Return the outcome of all sequences in one batch, and the mean tokens of a row."""
    runner = make_runner(path, max_model_len=256, num_kv_blocks=120, max_num_seqs=8, **options)
    serving, batch = Serving(runner, chunk=chunk, drafter=drafter), sequences()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.run(batch)
    decoding = [count for count in serving.num_tokens_of_rows if count]
    return [sequence.answer() for sequence in batch], float(np.mean(decoding))


def of_truth(expected: list[Any], num_right: int = K) -> Drafting:
    """Return a drafter with `num_right` right draft tokens, then wrong ones."""
    prompts = [sequence.prompt for sequence in sequences()]

    def drafted(sequence: ServedSequence) -> list[int]:
        outputs = expected[prompts.index(sequence.prompt)][0]
        drafts = outputs[len(sequence.outputs) : len(sequence.outputs) + K]
        return drafts[:num_right] + [(token_id + 1) % 40 for token_id in drafts[num_right:]]

    return drafted


def at_random(sequence: ServedSequence) -> list[int]:
    rng = np.random.default_rng(len(sequence.outputs))
    drafts: list[int] = rng.integers(0, 40, rng.integers(0, K + 1)).tolist()
    return drafts


FIXED = SpeculativeConfig(method="ngram,suffix", num_speculative_tokens=K, adaptive=False)
DRAFTS = {"speculative_config": FIXED}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "options",
    [{}, {"plan": "eager", "chunk": 5}, {"quantization": "wint8", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}],
    ids=["tape", "eager-chunked", "int8"],
)
def test_answers_do_not_depend_on_drafts(architecture: str, options: dict[str, Any]) -> None:
    path = GOLDEN / architecture
    expected, one = answers(path, None, **options)
    assert one == 1.0
    for drafter in (at_random, of_truth(expected), of_truth(expected, 2), None):
        found, num_tokens = answers(path, drafter, **DRAFTS, **options)
        assert found == expected
        if drafter not in (at_random, None):
            assert num_tokens > 2.2, "what is right stands"


@pytest.mark.parametrize("plan", ["tape", "eager"])
def test_masked_prompts_verify_drafts_correctly(plan: str) -> None:
    """Part of a prompt sees all of itself, or only nearby tokens. With the bounds kept in the steps that verify, and with
    rejected drafts, an answer equals that without drafts and differs from that without bounds."""

    def of_bounds(drafter: Drafting | None, *, has_bounds: bool = True, **options: Any) -> list[object]:
        runner = make_runner(GOLDEN / "qwen3", max_model_len=256, num_kv_blocks=120, max_num_seqs=8, plan=plan, **options)
        serving, batch = Serving(runner, drafter=drafter), sequences()[1:]
        for slot, sequence in enumerate(batch):
            places = np.arange(len(sequence.prompt))
            bounds = np.stack([np.maximum(places - 6, 0), np.maximum(places, 10 * (places < 11))], axis=1)
            sequence.mask_bounds = bounds.astype(np.int32).tobytes() if has_bounds else b""
            serving.place(sequence, slot)
        serving.run(batch)
        return [sequence.answer() for sequence in batch]

    expected = of_bounds(None)
    assert expected != of_bounds(None, has_bounds=False)
    prompts = [sequence.prompt for sequence in sequences()[1:]]

    def of_truth_at_first(sequence: ServedSequence) -> list[int]:
        outputs: list[int] = expected[prompts.index(sequence.prompt)][0]  # type: ignore[index]
        drafts = outputs[len(sequence.outputs) : len(sequence.outputs) + K]
        return drafts[:2] + [(token_id + 1) % 40 for token_id in drafts[2:]]

    for drafter in (at_random, of_truth_at_first):
        assert of_bounds(drafter, **DRAFTS) == expected


def test_reference_ops_verify_drafts() -> None:
    path, options = GOLDEN / "qwen3", {"ops": "reference", "plan": "eager"}
    expected, _ = answers(path, None, **options)
    found, num_tokens = answers(path, of_truth(expected, 3), **DRAFTS, **options)
    assert [answer[0] for answer in found] == [answer[0] for answer in expected]
    assert num_tokens > 2


def test_row_after_a_skipped_step_is_dropped() -> None:
    """The slot is not as far as the scheduler assumed when it sent the step, which it gives up."""
    slots = BatchSlots(np.zeros((1, 4, 8), np.int32), 64, 100, K)
    slots.start(SlotStart(1, "r", int32([5, 6, 7]), 3, SamplingParams(), b"", max_total_tokens=20))
    slots.drafts[1], slots.num_drafts[1] = 9, K
    columns = int32([1]), int32([4]), int32([1]), b"\1", b"", b"", b""
    step = Step(7, [], *columns, is_following=b"\1", num_drafts=int32([K]))
    rows = StepRows.of(step, slots)
    assert (rows.counts.tolist(), rows.num_sampled.tolist(), rows.num_drafts.tolist()) == ([0], [0], [0])
    rows = StepRows.of(replace(step, start=int32([2])), slots)
    assert (rows.starts.tolist(), rows.counts.tolist(), rows.num_sampled.tolist()) == ([2], [1 + K], [1 + K])
