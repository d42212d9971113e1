"""Sequences with LoRA adapters on a runner: the results of merged weights, and the same bits alone, together, on several ranks
and with every plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import GREEDY, answer, merge, write_adapter
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_checkpoint
from tests.workers.rank_group.serving import serve, serve_all
from tests.workers.rank_group.test_tensor_parallel import ODD, ODD_FUSED, ODD_PARALLEL, ODD_PLAIN, PRECISIONS, on_each
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.test_golden import SINKS
from tests.workers.variants import check_features
from workers.extensions.adapters.columns import AdapterColumns

PROMPTS = [[(11 * number + 5 * index) % 300 + 3 for index in range(length)] for number, length in enumerate((40, 3, 17, 70, 9))]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapters_of(directory: Path, model: Path, count: int, **config: Any) -> list[Path]:
    return [write_adapter(directory / f"adapter{seed}", model, seed=seed, rank=5 + 3 * seed, **config) for seed in range(count)]


@pytest.mark.parametrize("ops", [{}, {"ops": "reference", "plan": "eager"}], ids=["native", "reference"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "ernie4_5", "qwen3_moe", "gpt_oss"])
def test_adapter_equals_merged_weights(name: str, ops: dict[str, Any], tmp_path: Path) -> None:
    targets = ATTENTION if name in ("qwen3_moe", "gpt_oss") else (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    model = GOLDEN / name
    if name == "gpt_oss":
        model = tmp_path / "model"
        write_checkpoint(model, SINKS)
    check_merged(tmp_path, model, targets, ops)


@pytest.mark.parametrize("config", [ODD_PARALLEL, ODD_PLAIN], ids=["parallel", "plain"])
def test_adapter_of_other_mlps_equals_merged_weights(config: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", {**config, "logit_scale": 1.0})
    targets = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "c_fc", "c_proj")
    check_merged(tmp_path, tmp_path / "model", targets, {}, size=0.1)


@pytest.mark.parametrize(
    "name",
    [
        *("phi3", "glm4", "gemma4_text", "deepseek_v2", "glm4_moe_lite", "qwen2_moe", "llama4_text", "granitemoeshared"),
        *("qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h"),
    ],
)
def test_adapter_of_every_linear_equals_merged_weights(name: str, tmp_path: Path) -> None:
    """Fused projections, layers of several sizes, latent attention, MLPs beside experts, and recurrent layers."""
    check_features.adapter(check_features.configs()[name], tmp_path)


def check_merged(directory: Path, model: Path, targets: Iterable[str], ops: dict[str, Any], size: float = 0.02) -> None:
    (adapter,) = adapters_of(directory, model, 1, targets=targets, size=size)
    merged = make_runner(merge(directory / "merged", model, adapter), **ops)
    runner = make_runner(model, adapters=[adapter], **ops)
    for prompt in PROMPTS[:2]:
        expected, found, base = answer(merged, prompt, -1), answer(runner, prompt, 0), answer(runner, prompt, -1)
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=1e-3)
        np.testing.assert_allclose([each[1] for each in found[3]], [each[1] for each in expected[3]], atol=1e-3)
        assert np.abs(np.array([each[1] for each in found[3]]) - np.array([each[1] for each in base[3]])).max() > 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adapters_do_not_affect_each_other(precision: str, tmp_path: Path) -> None:
    """Four adapters and the base at once, 16 sequences, in chunks or not; rows without an adapter have the bits of an engine
    without adapters."""
    model, options = GOLDEN / "qwen3", PRECISIONS[precision]
    runner = make_runner(model, adapters=adapters_of(tmp_path, model, 4), **options)
    plain = make_runner(model, **options)
    alone = {
        (number, slot): answer(plain if slot < 0 else runner, prompt, slot)
        for number, prompt in enumerate(PROMPTS)
        for slot in range(-1, 4)
        if (number + slot) % 2
    }
    assert len({str(each) for each in alone.values()}) == len(alone)
    keys = [list(alone)[index % len(alone)] for index in range(16)]
    serving = Serving(runner, chunk=13, budget=50)
    sequences = [ServedSequence(PROMPTS[number], GREEDY, 8, adapter_slot=slot) for number, slot in keys]
    for place, sequence in enumerate(sequences):
        serving.place(sequence, place)
    serving.run(sequences)
    assert [sequence.answer() for sequence in sequences] == [alone[key] for key in keys]


@pytest.mark.slow
def test_several_ranks_equal_one_rank(tmp_path: Path) -> None:
    """Heads that end within panels, and matrices that are whole on each rank; op by op, captured, and in integers."""
    write_checkpoint(tmp_path / "model", ODD)
    adapters = adapters_of(tmp_path, tmp_path / "model", 2)
    options: list[dict[str, Any]] = [{}, {"plan": "eager"}, PRECISIONS["int8"]]
    options.append({"plan": "captured", "cudagraph_capture_sizes": (8, 4), "max_cudagraph_capture_size": 8})
    jobs = [(tmp_path / "model", {"max_model_len": 256, "adapters": adapters, **each}) for each in options]
    expected = [serve(*job) for job in jobs]
    assert expected[0] == expected[1] == expected[3] != serve(tmp_path / "model", {"max_model_len": 256})
    write_checkpoint(tmp_path / "fused", ODD_FUSED)
    of_fused = write_adapter(
        tmp_path / "of fused", tmp_path / "fused", targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    )
    jobs += [(tmp_path / "fused", {"max_model_len": 256, "adapters": [of_fused], **each}) for each in options[:2]]
    expected += [serve(*job) for job in jobs[-2:]]
    for num_ranks in (2, 3):
        assert on_each(num_ranks, serve_all, jobs) == [expected] * num_ranks


def test_drafts_do_not_change_adapter_answers(tmp_path: Path) -> None:
    """Drafts of layers, which draft without adapters, and of n-grams."""
    from tests.workers.mtp import drafting

    model = GOLDEN / "ernie4_5_moe"
    adapters = adapters_of(tmp_path, model, 2, targets=ATTENTION)
    expected = serve(model, {"max_model_len": 256, "adapters": adapters})
    for method in ("mtp", "ngram"):
        options = {"max_model_len": 256, "adapters": adapters, "speculative_config": drafting(3, method=method)}
        assert serve(model, options)[:-1] == expected


def test_reloaded_weights_keep_the_adapters(tmp_path: Path) -> None:
    model = GOLDEN / "qwen3"
    runner = make_runner(model, adapters=adapters_of(tmp_path, model, 1))
    before = answer(runner, PROMPTS[0], 0)
    runner.load(str(model), 2, lambda num_done, num_bytes: None)
    assert answer(runner, PROMPTS[0], 0) == before != answer(runner, PROMPTS[0], -1)


def test_adapter_slot_is_reused_cleanly(tmp_path: Path) -> None:
    """One of less rank and fewer modules leaves nothing of the one before."""
    from workers.extensions.adapters.reader import AdapterFiles

    model = GOLDEN / "qwen3"
    large, small = adapters_of(tmp_path, model, 2)
    write_adapter(small, model, rank=1, targets=("q_proj", "down_proj"), seed=7)
    runner, fresh = make_runner(model, adapters=[large]), make_runner(model, adapters=[small])
    adapters = runner.find(AdapterColumns)
    assert adapters is not None
    arena = adapters.arena
    before = answer(runner, PROMPTS[0], 0)
    contents = arena.write(0, AdapterFiles(small, arena.layout).linears())
    assert answer(runner, PROMPTS[0], 0) == answer(fresh, PROMPTS[0], 0) != before
    assert contents == arena.write(1, AdapterFiles(small, arena.layout).linears())
    assert contents != arena.write(1, AdapterFiles(large, arena.layout).linears())
