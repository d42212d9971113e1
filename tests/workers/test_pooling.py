"""Vectors and scores of the runner: within 1e-4 of transformers, and the same bits alone, together, in chunks, from the cache
and recomputed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.record import ModelRecord
from engine.config import SpeculativeConfig
from engine.messages import Pooling, SamplingParams, SlotStart, Step
from engine.options.resolve_pooling import resolve_pooling
from tests.paths import DRAWN
from tests.pooled import MODELS, TOLERANCE, write_checkpoint
from tests.workers import checkpoints
from tests.workers.serving import int32, make_runner
from tests.workers.variants import check_features
from workers.engine.runner import ModelRunner
from workers.extensions.pooling import finished, sigmoid

BOTH_WAYS: dict[str, Any] = json.loads((DRAWN / "both_ways.json").read_text())
BLOCK_SIZE, BLOCKS_OF_SLOT = 16, 16
BACKENDS = {"native": ("native", "tape"), "reference": ("reference", "eager")}
ASKED = {"runner": "auto", "pooler_config": {}, "speculative_config": SpeculativeConfig(), "enable_prefix_caching": True}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_checkpoint(request.param, tmp_path_factory.mktemp("pooling") / "model")


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, checkpoint: tuple[str, Path]) -> ModelRunner:
    pooling, record = resolve_pooling(ASKED, ModelRecord.read(checkpoint[1]))
    ops, plan = BACKENDS[request.param]
    options = {"ops": ops, "plan": plan, "pooling": pooling, "num_kv_blocks": 600}
    options["max_model_len"] = min(256, record.config.max_position_embeddings)
    return make_runner(checkpoint[1], model=record.config, **options)


def pooled(
    runner: ModelRunner, cases: list[Any], *, chunk: int = 512, budget: int = 512, first_slot: int = 0, cached: int = 0
) -> list[np.ndarray]:
    """Return the answers of cases that are computed together, in steps of `chunk` tokens of each prompt and `budget` of all.
    `cached`: tokens at the beginning that are in cached blocks."""
    prompts = [case["token_ids"] for case in cases]
    computed = [cached] * len(prompts)
    started = [False] * len(prompts)
    answers: dict[int, bytes] = {}
    step_id = 0
    while len(answers) < len(prompts):
        left, rows, starts, step_id = budget, [], [], step_id + 1
        for index, prompt in enumerate(prompts):
            count = min(len(prompt) - computed[index], chunk, left)
            if count <= 0:
                continue
            left -= count
            rows.append((index, computed[index], count))
            computed[index] += count
            if not started[index]:
                started[index] = True
                slot = first_slot + index
                first = 1 + slot * BLOCKS_OF_SLOT
                blocks = range(first, first - len(prompt) // -BLOCK_SIZE)
                sampling = SamplingParams(max_tokens=0, pooling=Pooling())
                start = SlotStart(slot, f"r{index}", int32(prompt), len(prompt), sampling, int32(blocks))
                start.max_total_tokens, start.second_start = len(prompt), cases[index].get("second_start", 0)
                starts.append(start)
        columns = (int32(first_slot + index for index, _, _ in rows), *(int32(row[place] for row in rows) for place in (1, 2)))
        result = runner.run(Step(step_id, starts, *columns, bytes(len(rows)), b"", b"", b""))
        answers |= {rows[row][0]: values for row, values in result.pooled.items()}
    return [np.frombuffer(answers[index], np.float32) for index in range(len(prompts))]


def test_vectors_equal_those_of_transformers(checkpoint: tuple[str, Path], runner: ModelRunner) -> None:
    cases = MODELS[checkpoint[0]]["cases"]
    expected = [case.get("vector") or [case["score"]] for case in cases]
    alone = [pooled(runner, [case], first_slot=3)[0] for case in cases]
    for found, right in zip(alone, expected, strict=True):
        assert found == pytest.approx(np.array(right), abs=TOLERANCE)
    ways = [pooled(runner, cases), pooled(runner, cases[::-1] * 3, budget=500)[: len(cases)][::-1]]
    if MODELS[checkpoint[0]]["config"]["model_type"] == "qwen3":
        ways += [pooled(runner, cases, chunk=7), pooled(runner, cases, budget=40, chunk=33)]
    for way in ways:
        assert [each.tobytes() for each in way] == [each.tobytes() for each in alone]


def test_pooling_after_a_cached_prefix(checkpoint: tuple[str, Path], runner: ModelRunner) -> None:
    """The last token represents the prompt: earlier tokens were computed for other requests."""
    assert runner.config.pooling is not None
    if runner.config.pooling.needs_all_tokens:
        return
    case = max(MODELS[checkpoint[0]]["cases"], key=lambda case: len(case["token_ids"]))
    whole = pooled(runner, [case])
    cached = (len(case["token_ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert pooled(runner, [case], cached=cached)[0].tobytes() == whole[0].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_decoders_that_attend_both_ways(name: str, backend: str, tmp_path: Path) -> None:
    """The mean that transformers computes; alone and beside others the same bits."""
    case = BOTH_WAYS[name]
    checkpoints.write_checkpoint(tmp_path, case["config"])
    asked = ASKED | {"pooler_config": {"kind": "mean", "is_normalized": False}}
    pooling, record = resolve_pooling(asked, ModelRecord.read(tmp_path))
    assert pooling is not None
    assert pooling.is_whole
    ops, plan = BACKENDS[backend]
    runner = make_runner(tmp_path, model=record.config, ops=ops, plan=plan, pooling=pooling, max_model_len=256)
    others = [{"token_ids": case["prompt_token_ids"][first:]} for first in (30, 0, 7)]
    alone, beside = pooled(runner, others[1:2])[0], pooled(runner, others)[1]
    np.testing.assert_allclose(alone, case["mean"], atol=TOLERANCE)
    assert alone.tobytes() == beside.tobytes()


def test_dense_modules_follow_pooling(tmp_path: Path) -> None:
    """EmbeddingGemma has two of them, then the norm."""
    case = BOTH_WAYS["gemma3_text, windows of 4"]
    checkpoints.write_checkpoint(tmp_path, case["config"])
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    steps = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{index}" * (index > 0)} for index, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    random = np.random.default_rng(2)
    expected = np.array(case["mean"])
    for index, (num_outputs, has_bias, activation) in enumerate(
        ((80, False, "linear.Identity"), (32, True, "activation.Tanh")), 2
    ):
        (tmp_path / str(index)).mkdir()
        options = {"in_features": len(expected), "out_features": num_outputs, "bias": has_bias}
        options["activation_function"] = f"torch.nn.modules.{activation}"
        (tmp_path / str(index) / "config.json").write_text(json.dumps(options))
        tensors = {"linear.weight": random.standard_normal((num_outputs, len(expected)), np.float32) / 5}
        expected = tensors["linear.weight"] @ expected
        if has_bias:
            tensors["linear.bias"] = random.standard_normal(num_outputs, np.float32)
            expected = np.tanh(expected + tensors["linear.bias"])
        checkpoints.write_safetensors(tmp_path / str(index) / "model.safetensors", tensors)
    pooling, record = resolve_pooling(ASKED, ModelRecord.read(tmp_path))
    assert pooling is not None
    assert (pooling.kind, pooling.num_values, pooling.is_normalized) == ("mean", 32, True)
    runner = make_runner(tmp_path, model=record.config, pooling=pooling, max_model_len=256)
    found = pooled(runner, [{"token_ids": case["prompt_token_ids"]}])[0]
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=TOLERANCE)


def test_truncated_vectors_are_normalized(runner: ModelRunner) -> None:
    pooling = runner.config.pooling
    assert pooling is not None
    if pooling.task != "embed":
        logits = np.arange(1000.0)[: 1000 if pooling.class_token_ids else 1]
        logit = 100.0 if pooling.class_token_ids else 0.0
        assert finished(logits, Pooling(is_finished=False), pooling).tolist() == [logit]
        assert finished(logits, Pooling(), pooling).tolist() == [sigmoid(logit)]
        return
    values = np.arange(1.0, pooling.num_values + 1)
    cut = finished(values, Pooling(num_dimensions=3), pooling)
    expected = values[:3] / np.sqrt(14) if pooling.is_normalized else values[:3]
    assert cut == pytest.approx(expected)
    assert finished(values, Pooling(is_finished=False), pooling).tolist() == values.tolist()
    assert finished(values, Pooling(3, is_finished=True), pooling) == pytest.approx(values[:3] / np.sqrt(14))


def test_sigmoid_handles_any_size() -> None:
    assert [sigmoid(value) for value in (0.0, 1e4, -1e4)] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("family", "beginning"), [("gemma3_text", "Gemma3"), ("gemma4_text", "Gemma4"), ("llama4_text", "Llama4")]
)
def test_text_models_published_alone_are_read(family: str, beginning: str, tmp_path: Path) -> None:
    config = {
        **check_features.configs()[family],
        "architectures": [f"{beginning}TextForSequenceClassification"],
        "num_labels": 1,
    }
    assert checkpoints.write_config(tmp_path / "classifier", config).task == "classify"
    model = checkpoints.write_config(tmp_path, {**config, "architectures": [f"{beginning}TextModel"]})
    assert (model.architecture, model.task) == (family, "embed")
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoints.drawn_tensors(model).items()}
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors, metadata={"format": "pt"})
    make_runner(tmp_path, pooling=resolve_pooling(ASKED, ModelRecord.read(tmp_path))[0])
