"""The runner's weights: replaced completely or not at all, and their leftovers do not affect later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.messages import SamplingParams, Step
from tests.workers.checkpoints import TINY, drawn_tensors, write_checkpoint, write_config, write_safetensors
from tests.workers.serving import ARCHITECTURES, GOLDEN, ServedSequence, Serving, make_runner
from workers.engine.runner import ModelRunner

PROMPT = [5, 9, 3, 30, 22, 8, 17]


def quiet(num_done: int, num_bytes: int) -> None:
    """Ignore progress."""


def answer(runner: ModelRunner, chunk: int = 4) -> tuple[object, ...]:
    sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2), 8)
    serving = Serving(runner, chunk=chunk)
    serving.place(sequence, 2)
    serving.run([sequence])
    return sequence.answer()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "first", TINY)
    return tmp_path / "first"


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """Other weights of the same shape."""
    config = write_config(tmp_path / "second", TINY)
    tensors = {name: values * np.float32(1.5) for name, values in drawn_tensors(config).items()}
    write_safetensors(tmp_path / "second" / "model.safetensors", tensors)
    return tmp_path / "second"


def runner_of(path: Path, **options: Any) -> ModelRunner:
    return make_runner(path, max_model_len=64, num_kv_blocks=16, max_num_seqs=4, **options)


def test_reload_equals_a_fresh_start(first: Path, second: Path) -> None:
    runner = runner_of(first)
    before = answer(runner)
    runner.load(str(second), 2, quiet)
    assert (runner.weights.version, runner.weights.path) == (2, str(second))
    assert answer(runner) == answer(runner_of(second)) != before
    runner.load(str(first), 3, quiet)
    assert answer(runner) == before


def test_broken_checkpoint_changes_nothing(first: Path, second: Path) -> None:
    runner = runner_of(first)
    before = answer(runner)
    weights = second / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        runner.load(str(second), 2, quiet)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        runner.load(str(second), 2, quiet)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        runner.load(str(second / "nowhere"), 2, quiet)
    assert runner.weights.version == 1
    assert answer(runner) == before


def test_reload_with_another_shape_is_refused(first: Path, tmp_path: Path) -> None:
    runner = runner_of(first)
    write_checkpoint(tmp_path / "other", {**TINY, "intermediate_size": 32, "rms_norm_eps": 1e-5})
    with pytest.raises(CheckpointError, match=r"intermediate_size: 24, 32; rms_norm_eps: 1e-06, 1e-05"):
        runner.load(str(tmp_path / "other"), 2, quiet)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_nan_in_the_cache_does_not_spread(first: Path, tmp_path: Path, kv_cache_dtype: str) -> None:
    """NaN in the cache, also in the dummy block, does not affect the answers of later weights. (Overflow causes it: NaN itself
    is not loaded.)"""
    config = write_config(tmp_path / "broken", TINY)
    tensors = drawn_tensors(config)
    broken = {name: values if "embed" in name else values * np.float32(1e30) for name, values in tensors.items()}
    write_safetensors(tmp_path / "broken" / "model.safetensors", broken)
    runner = runner_of(first, kv_cache_dtype=kv_cache_dtype)
    before = answer(runner)
    runner.load(str(tmp_path / "broken"), 2, quiet)
    assert np.isnan(answer(runner)[1]).all()  # type: ignore[call-overload]
    runner.load(str(first), 3, quiet)
    assert answer(runner) == before


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_narrow_cache_keeps_the_bits(first: Path, kv_cache_dtype: str) -> None:
    """The same bits for any chunks, op by op and on two threads; log-probabilities near those of a cache in float32."""
    narrow = answer(runner_of(first, kv_cache_dtype=kv_cache_dtype))
    for options in ({"plan": "eager"}, {"threads": 2}):
        assert answer(runner_of(first, kv_cache_dtype=kv_cache_dtype, **options)) == narrow
    for chunk in (1, 3, 7):
        assert answer(runner_of(first, kv_cache_dtype=kv_cache_dtype), chunk) == narrow
    assert np.abs(np.array(narrow[1]) - np.array(answer(runner_of(first))[1])).max() < 0.05


def test_step_without_weights_fails_an_assertion(first: Path) -> None:
    runner = runner_of(first)
    runner.clear()
    assert runner.weights.version == 0
    with pytest.raises(AssertionError, match="step 9 arrived while the weights are cleared"):
        runner.run(Step(9, [], b"", b"", b"", b"", b"", b"", b""))


def test_empty_step_returns_nothing(first: Path) -> None:
    result = runner_of(first).run(Step(9, [], b"", b"", b"", b"", b"", b"", b""))
    assert (result.step_id, result.token_ids, result.num_tokens) == (9, b"", 0)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    write_config(tmp_path, TINY)
    first, again = (make_runner(tmp_path, max_model_len=64, num_kv_blocks=16, load_format="dummy") for _ in range(2))
    assert answer(first) == answer(again)


@pytest.mark.parametrize("options", [{}, {"ops": "reference", "plan": "eager"}], ids=["native", "reference"])
def test_prompt_logprobs_cover_every_token_once(first: Path, options: dict[str, str]) -> None:
    """Every prompt token after the first has one, with its rank and the requested best tokens; none a second time."""
    runner = make_runner(first, max_model_len=64, num_kv_blocks=16, max_num_seqs=4, **options)
    sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0, num_prompt_logprobs=2), 3)
    serving = Serving(runner, chunk=3)
    serving.place(sequence, 0)
    serving.run([sequence])
    assert sorted(sequence.prompt_logprobs) == list(range(1, len(PROMPT)))
    for position, ids in sequence.prompt_tops.items():
        assert len(ids) == 2
        assert (sequence.prompt_ranks[position] == 1) == (ids[0] == PROMPT[position])
    assert not sequence.tops
    found, sequence.prompt_logprobs = sequence.prompt_logprobs, {}
    serving.place(sequence, 1)  # preempted: computed again, its log-probabilities are known
    sequence.num_outputs += 1
    serving.run([sequence])
    assert found
    assert not sequence.prompt_logprobs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("options", [{}, {"plan": "eager"}, {"ops": "reference", "plan": "eager"}], ids=str)
def test_skipped_last_layer_rows_keep_the_bits(architecture: str, options: dict[str, str]) -> None:
    """Sequences have the same bits whether the last layer computes all rows of their prompts, for log-probabilities, or only
    the last, and beside others of either kind."""
    runner = make_runner(GOLDEN / architecture, max_model_len=128, num_kv_blocks=100, max_num_seqs=12, **options)

    def sequence(num_prompt_logprobs: int, length: int) -> ServedSequence:
        sampling = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=num_prompt_logprobs)
        return ServedSequence([5 + index * 7 % 30 for index in range(length)], sampling, 3)

    def serve(sequences: list[ServedSequence], chunk: int) -> list[ServedSequence]:
        serving = Serving(runner, budget=90, chunk=chunk)
        for slot, member in enumerate(sequences):
            serving.place(member, slot)
        serving.run(sequences)
        return sequences

    (all_rows,) = serve([sequence(1, 50)], 512)
    crowd = serve([sequence(-1, 33), sequence(-1, 50), sequence(1, 50), sequence(0, 20), sequence(-1, 7)], 23)
    for one in (*serve([sequence(-1, 50)], 512), *serve([sequence(-1, 50)], 9), crowd[1], crowd[2]):
        assert (one.outputs, one.logprobs, one.tops) == (all_rows.outputs, all_rows.logprobs, all_rows.tops)
    assert crowd[2].prompt_logprobs == all_rows.prompt_logprobs
    assert not crowd[1].prompt_logprobs


@pytest.mark.parametrize("plan", ["tape", "eager"])
def test_rows_beyond_the_logit_limit(first: Path, plan: str) -> None:
    """Prompts' log-probabilities and samples beyond `max_logit_rows` equal those of small steps."""
    runner = make_runner(first, max_model_len=256, num_kv_blocks=400, max_num_seqs=80, plan=plan)
    limit = runner.inputs.max_logit_rows
    sampling = SamplingParams(seed=1, num_logprobs=1, num_prompt_logprobs=1)
    whole, chunked = (ServedSequence([5 + index % 30 for index in range(2 * limit + 7)], sampling, 3) for _ in range(2))
    for sequence, chunk in ((whole, 512), (chunked, 9)):
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 3)
        serving.run([sequence])
    assert len(whole.prompt_logprobs) == 2 * limit + 6
    assert whole.answer() == chunked.answer()
    crowd = [
        ServedSequence(PROMPT[: 1 + index % 7], SamplingParams(seed=index, num_logprobs=1), 3) for index in range(limit + 9)
    ]
    alone = [ServedSequence(member.prompt, member.sampling, 3) for member in (crowd[limit - 1], crowd[limit], crowd[-1])]
    serving = Serving(runner)
    for slot, member in enumerate(crowd):
        serving.place(member, slot)
    serving.run(crowd)
    for sequence, member in zip(alone, (crowd[limit - 1], crowd[limit], crowd[-1]), strict=True):
        serving = Serving(runner)
        serving.place(sequence, 0)
        serving.run([sequence])
        assert sequence.answer() == member.answer()


def test_seeded_samples_do_not_depend_on_the_batch(first: Path) -> None:
    """Alone, in chunks, in another slot, among others: the same tokens; other seeds and sample indexes give others."""
    runner = make_runner(first, max_model_len=128, num_kv_blocks=100, max_num_seqs=12)

    def sequence(seed: int, index: int) -> ServedSequence:
        sampling = SamplingParams(temperature=1.2, top_p=0.95, seed=seed, sample_index=index, num_logprobs=1)
        return ServedSequence(PROMPT, sampling, 20)

    alone = sequence(1, 0)
    serving = Serving(runner)
    serving.place(alone, 0)
    serving.run([alone])
    crowd = [sequence(seed, index) for seed in (3, 1, 2) for index in (2, 0, 1)]
    serving = Serving(runner, budget=40, chunk=5)
    for slot, member in enumerate(crowd):
        serving.place(member, slot)
    serving.run(crowd)
    assert [member.answer() == alone.answer() for member in crowd].count(True) == 1
    assert crowd[4].answer() == alone.answer()
    assert len({tuple(member.outputs) for member in crowd}) == len(crowd)
