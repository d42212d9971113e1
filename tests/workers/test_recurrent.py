"""Recurrent states on a rank: a sequence's bits depend on nothing but its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.state_spec import StateSpec
from engine.config import SpeculativeConfig
from engine.messages import SamplingParams
from tests.workers.checkpoints import write_checkpoint
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.test_variants import VARIANTS
from workers.engine.runner import ModelRunner

SIZE = 4
NAMES = ("granitemoehybrid", "qwen3_5", "lfm2")
SIZES = {"max_model_len": 160, "num_kv_blocks": 300, "max_num_seqs": 8, "block_size": SIZE, "state_cache_interval": 8}


class EarlyConfig(SpeculativeConfig, frozen=True, kw_only=True):
    """Drafts of n-grams in an engine that continues one position early, as it does with draft layers."""

    @property
    def num_overlap(self) -> int:
        return 1


EARLY = {"speculative_config": EarlyConfig(method="ngram", num_speculative_tokens=4, adaptive=False)}
DRAFTS = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)}


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("recurrent") / request.param
    write_checkpoint(path, VARIANTS[request.param]["config"])
    return path


def sequence(seed: int = 0, num_prompt: int = 66, num_outputs: int = 12, **options: Any) -> ServedSequence:
    prompt = np.random.default_rng(seed).integers(3, 90, num_prompt).tolist()
    return ServedSequence(prompt, SamplingParams(temperature=0.0, num_logprobs=2, **options), num_outputs)


def runner_of(path: Path, **options: Any) -> ModelRunner:
    return make_runner(path, **(SIZES | options))


def served(runner: ModelRunner, *sequences: ServedSequence, **options: Any) -> Serving:
    serving = Serving(runner, block_size=SIZE, **options)
    for slot, each in enumerate(sequences):
        serving.place(each, slot)
    serving.run(list(sequences))
    return serving


def alone(path: Path, **options: Any) -> tuple[object, ...]:
    each = sequence(**options)
    served(runner_of(path), each)
    return each.answer()


def test_every_chunk_size_gives_the_same_bits(model: Path) -> None:
    runner, expected = runner_of(model), alone(model)
    for chunk in range(1, 65):
        each = sequence()
        served(runner, each, chunk=chunk)
        assert each.answer() == expected, f"chunks of {chunk}"


def test_prompt_logprobs_do_not_depend_on_chunks(model: Path) -> None:
    runner, expected = runner_of(model), alone(model, num_prompt_logprobs=1)
    assert expected[-1]
    for chunk in (1, 7, 64):
        each = sequence(num_prompt_logprobs=1)
        served(runner, each, chunk=chunk)
        assert each.answer() == expected


def test_batch_changes_no_bit(model: Path) -> None:
    runner = runner_of(model)
    together = [sequence(seed, 9 + 8 * seed, 5 + seed) for seed in range(8)]
    served(runner, *together, chunk=6)
    for seed, each in enumerate(together):
        assert each.answer() == alone(model, seed=seed, num_prompt=9 + 8 * seed, num_outputs=5 + seed)


def test_every_kept_state_continues_to_the_same_bits(model: Path) -> None:
    runner, expected = runner_of(model), alone(model)
    for chunk in (5, 17):
        first = sequence()
        serving = served(runner, first, chunk=chunk)
        found = [count for count in serving.kept_blocks(first) if count * SIZE < len(first.prompt)]
        assert len(found) >= 3
        for num_blocks in found:
            again = sequence()
            serving.place(again, 1, first.block_ids[:num_blocks])
            serving.run([again])
            assert again.answer() == expected, f"after {num_blocks} blocks"


def test_next_turn_continues_from_the_answer(model: Path) -> None:
    runner, first = runner_of(model), sequence()
    serving = served(runner, first)
    turn = [*first.tokens, 5, 6, 7, 8, 9]
    num_blocks = max(serving.kept_blocks(first))
    assert num_blocks * SIZE > len(first.prompt)
    second, other = (ServedSequence(turn, SamplingParams(temperature=0.0, num_logprobs=2), 9) for _ in range(2))
    serving.place(second, 3, first.block_ids[:num_blocks])
    serving.run([second])
    served(runner_of(model), other)
    assert second.answer() == other.answer()


def drafter_of(right: list[int], num_right: int) -> Callable[[ServedSequence], list[int]]:
    """Return drafts of which so many are right, and the others wrong."""

    def draft(each: ServedSequence) -> list[int]:
        future = right[len(each.outputs) :][:4]
        return [token if place < num_right else (token + 1) % 90 for place, token in enumerate(future)]

    return draft


@pytest.mark.parametrize("options", [DRAFTS, EARLY], ids=["drafts", "early"])
@pytest.mark.parametrize("num_right", range(5))
def test_every_number_of_accepted_drafts_gives_the_same_bits(model: Path, num_right: int, options: dict[str, Any]) -> None:
    expected = alone(model, num_outputs=30)
    each, other = sequence(num_outputs=30), sequence(3, 20, 30)
    right = list(expected[0])  # type: ignore[call-overload]
    serving = served(runner_of(model, **options), each, other, drafter=drafter_of(right, num_right), chunk=9)
    assert each.answer() == expected
    assert other.answer() == alone(model, seed=3, num_prompt=20, num_outputs=30)
    if num_right:
        assert max(serving.num_tokens_of_rows) > 1
    for num_blocks in serving.kept_blocks(each):
        if num_blocks * SIZE >= len(each.prompt):
            continue
        again = sequence(num_outputs=30)
        serving.place(again, 2, each.block_ids[:num_blocks])
        serving.run([again])
        assert again.answer() == expected


@pytest.mark.parametrize("options", [{}, DRAFTS, EARLY], ids=["plain", "drafts", "early"])
def test_step_of_a_killed_rank_changes_nothing(model: Path, options: dict[str, Any]) -> None:
    """Its states are written, but no result is back: the next process reads the confirmed ones."""
    config = ModelConfig.read(model)
    drafts = options.get("speculative_config", SpeculativeConfig())
    of_states, of_cache = StateSpec.of(config, drafts.num_logged), KVCacheSpec.of(config, SIZE, "float32")
    assert of_states is not None
    states = memoryview(bytearray(of_states.arena_bytes(100)))
    arena = memoryview(bytearray(of_cache.arena_bytes(SIZES["num_kv_blocks"])))
    expected = alone(model, num_outputs=20)
    right = list(expected[0])  # type: ignore[call-overload]
    lives = {"arena": arena, "states": states, "num_states": 100, **options}
    each = sequence(num_outputs=20)
    serving = Serving(runner_of(model, **lives), block_size=SIZE, chunk=13, drafter=drafter_of(right, 2))
    serving.place(each, 0)
    while not each.is_done:
        count = min(len(each.tokens) - each.num_computed, 13)
        message = serving._message([(each, count)])
        serving._draft(message, [(each, count)])
        serving.runner.run(message)  # and its result is lost
        assert serving.states is not None
        serving.states.rollback(each.states)
        each.is_started = False
        each.num_computed = max(each.num_computed - drafts.num_overlap, each.states.position)
        serving = Serving(runner_of(model, **lives), block_size=SIZE, chunk=13, drafter=serving.drafter, states=serving.states)
        serving.step([each])
    assert each.answer() == expected


def test_unused_slot_of_a_state_is_never_written(model: Path) -> None:
    runner = runner_of(model)
    served(runner, sequence(), sequence(1, 30), chunk=9)
    states = runner._cache.states
    assert states is not None
    assert not np.asarray(states.memory)[0].any()
    assert np.asarray(states.memory)[1].any()
