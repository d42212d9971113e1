"""Whole models on a card by its driver alone, which is emulated: metadata, attention, linears, experts and everything between.
The answers equal the native ops' to the token, with the same bits in any batch, chunks, order of threads, and as graphs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.config import SpeculativeConfig
from engine.errors import OptionError
from engine.messages import SamplingParams
from ops.cpu.int_packing import rounded
from ops.weight_format import WeightFormat, float32
from tests.devices.driver import emulated_driver
from tests.ops.cuda.card import emulated_card
from tests.paths import GOLDEN, TEXT_MODELS
from tests.workers.mtp import drafting, write_walk
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.test_runners import NGRAM, NONE, plain_sequences, run_ahead, run_alone
from workers.devices.capabilities import DeviceError
from workers.engine.runner import ModelRunner
from workers.extensions.drafts.mtp_steps import MtpSteps
from workers.runners import cpu_runner, gpu_runner

INT8 = WeightFormat("int8")
SIZES: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4, "ops": "native"}


def captured(unit: int) -> dict[str, Any]:
    sizes = tuple(unit * count for count in (4, 2))
    return {"plan": "captured", "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[0]}


def on_card(path: Path, **options: Any) -> ModelRunner:
    """Return the core of a runner on the emulated card."""
    own = {"ops": "cuda", "device": "gpu", "plan": "eager", "device_arena_library": emulated_driver()}
    return make_runner(path, kind=gpu_runner, **{**SIZES, **own, **options})


def on_host(path: Path, **options: Any) -> ModelRunner:
    return make_runner(path, kind=cpu_runner, **{**SIZES, **options})


def sequences() -> list[ServedSequence]:
    words = [5, 9, 3, 30, 22, 8, 17]
    drawn = SamplingParams(temperature=0.8, seed=4)
    return [
        ServedSequence(words[:3], SamplingParams(temperature=0.0, num_logprobs=2), 3),
        ServedSequence(words + words[:4], drawn, 2),
    ]


def answers(runner: ModelRunner, *, is_alone: bool = False, chunk: int = 64) -> list[tuple[object, ...]]:
    batch = sequences()
    for group in [[each] for each in batch] if is_alone else [batch]:
        serving = Serving(runner, chunk=chunk)
        for slot, sequence in enumerate(group):
            serving.place(sequence, slot)
        serving.run(group)
    return [sequence.answer() for sequence in batch]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_golden_models_agree_with_native_ops(name: str) -> None:
    runner = on_card(GOLDEN / name, max_model_len=32)
    assert runner.device.ops.name == "cuda"
    found, expected = answers(runner), answers(on_host(GOLDEN / name))
    assert [answer[0] for answer in found] == [answer[0] for answer in expected]
    for answer, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(answer[1], other[1], atol=1e-3)
    emulated_card().seed(7)
    assert answers(runner, is_alone=True, chunk=8) == found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text", "qwen3_moe"])
def test_bfloat16_has_the_same_bits_in_any_batch(name: str) -> None:
    """Activations are bfloat16, too; log-probabilities are near those of the native ops, whose activations are float32."""
    runner = on_card(GOLDEN / name, max_model_len=32, dtype="bfloat16", kv_cache_dtype="bfloat16", **captured(1))
    found, expected = answers(runner), answers(on_host(GOLDEN / name, dtype="bfloat16"))
    for answer, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(answer[1][0], other[1][0], atol=0.15)
    emulated_card().seed(3)
    assert answers(runner, is_alone=True, chunk=8) == found


@pytest.mark.slow
def test_sampled_tokens_stay_on_the_card() -> None:
    """Sampling with temperature too; sequences that the host samples change no bit of it, nor does a step that must be known
    first."""
    runner = on_card(GOLDEN / "llama", max_model_len=64)
    alone, ahead, beside = plain_sequences(0.9, 3), plain_sequences(0.9, 3), plain_sequences(0.9, 3)
    run_alone(runner, alone)
    assert run_ahead(runner, ahead) > 0
    assert [sequence.answer() for sequence in ahead] == [sequence.answer() for sequence in alone]
    penalized = ServedSequence([5, 9, 3], SamplingParams(temperature=0.9, presence_penalty=0.5, seed=8), 5)
    serving = Serving(runner)
    for slot, sequence in enumerate([*beside, penalized]):
        serving.place(sequence, slot)
    serving.run([*beside, penalized])
    assert [sequence.answer() for sequence in beside] == [sequence.answer() for sequence in alone]
    run_alone(on_host(GOLDEN / "llama"), expected := plain_sequences(0.9, 3))
    assert [sequence.outputs for sequence in alone] == [sequence.outputs for sequence in expected]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_drafts_and_masks_keep_the_bits(plan: str) -> None:
    """Rows of several tokens of a sequence, with rejected ones that are overwritten; a prompt with bounds on its keys. One
    token a row and many have the same bits."""

    def run(make: Callable[..., ModelRunner], config: SpeculativeConfig, **options: Any) -> list[tuple[object, ...]]:
        runner = make(GOLDEN / "llama", max_model_len=64, speculative_config=config, **options)
        bounds = np.stack([np.zeros(12), np.maximum(np.arange(12), 9)], 1).astype(np.int32)
        greedy = SamplingParams(temperature=0.0, num_logprobs=0)
        batch = [
            ServedSequence([5, 9, 3] * 4, greedy, 8),
            ServedSequence([7, 8, 9, 4] * 3, greedy, 5, mask_bounds=bounds.tobytes()),
        ]
        serving = Serving(runner, chunk=12, drafter=half_right if config is NGRAM else None)
        for slot, sequence in enumerate(batch):
            serving.place(sequence, slot)
        serving.run(batch)
        num_tokens.append(max(serving.num_tokens_of_rows))
        return [sequence.answer() for sequence in batch]

    def half_right(sequence: ServedSequence) -> list[int]:
        outputs: Any = answer_to[sequence.prompt[0]]
        first, *others = outputs[len(sequence.outputs) :][:2] or [0]
        return [first, *((token_id + 1) % 40 for token_id in others)]

    num_tokens: list[int] = []
    plain = run(on_card, NONE)
    answer_to = {5: plain[0][0], 7: plain[1][0]}
    assert run(on_card, NGRAM, **(captured(3) if plan == "captured" else {})) == plain
    assert num_tokens == [1, 2], "drafts stood, and were rejected"
    assert [answer[0] for answer in plain] == [answer[0] for answer in run(on_host, NONE)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_drafts_of_mtp_layers_are_accepted(plan: str, tmp_path: Path) -> None:
    """Without drafts on the host, with drafts there, and with drafts that stay on the card."""
    write_walk(tmp_path, np.random.default_rng(0).permutation(80), is_by_hidden=True)

    def run(make: Callable[..., ModelRunner], **options: Any) -> tuple[list[int], list[int]]:
        runner = make(tmp_path, max_model_len=48, **options)
        serving, sequence = Serving(runner), ServedSequence([5, 9, 3], SamplingParams(temperature=0.0), 12)
        serving.place(sequence, 0)
        serving.run([sequence])
        return sequence.outputs, serving.num_tokens_of_rows

    expected, _ = run(on_host)
    drafts = {"speculative_config": drafting(2)}
    of_host = run(on_host, **drafts)
    assert run(on_card, **drafts, **(captured(3) if plan == "captured" else {})) == of_host
    assert (of_host[0], max(of_host[1])) == (expected, 3)


def test_failed_reload_keeps_the_layers_that_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights that do not run, after they were loaded, leave nothing behind: the present layers' drafts are right."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        write_walk(tmp_path / str(number), np.random.default_rng(number).permutation(80), is_by_hidden=True)
    runner = on_card(tmp_path / "0", max_model_len=48, speculative_config=drafting(2), is_cache_estimated=True, **captured(3))

    def run() -> tuple[list[int], list[int]]:
        serving, sequence = Serving(runner), ServedSequence([5, 9, 3], SamplingParams(temperature=0.0), 8)
        serving.place(sequence, 0)
        serving.run([sequence])
        return sequence.outputs, serving.num_tokens_of_rows

    expected = run()
    assert max(expected[1]) == 3
    with monkeypatch.context() as patch:
        patch.setenv("LIBCUDA_FAILS", "cuMemcpyDtoHAsync_v2")
        with pytest.raises(DeviceError, match=r"a step of .* rows does not fit"):
            runner.load(str(tmp_path / "1"), 2, lambda num_done, num_bytes: None)
    assert (runner.weights.version, run()) == (1, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_mtp_layers_keep_the_bits(dtype: str) -> None:
    """Rejected drafts, a sequence with prompt log-probabilities, and one whose logits the host reads after the layers ran."""
    sizes = {"max_model_len": 48, "dtype": dtype, "kv_cache_dtype": dtype}

    def run(**options: Any) -> tuple[list[tuple[object, ...]], ModelRunner]:
        runner = on_card(GOLDEN / "deepseek_v3", **sizes, **options)
        batch = [
            ServedSequence([5, 9, 3, 30], SamplingParams(temperature=0.0, num_logprobs=2), 6),
            ServedSequence([5, 9, 3], SamplingParams(temperature=0.9, presence_penalty=0.5, seed=8), 5),
            ServedSequence([7, 8, 9, 4], SamplingParams(temperature=0.0, num_prompt_logprobs=1), 4),
        ]
        serving = Serving(runner, chunk=16)
        for slot, sequence in enumerate(batch):
            serving.place(sequence, slot)
        serving.run(batch)
        return [sequence.answer() for sequence in batch], runner

    expected, _ = run()
    found, runner = run(speculative_config=drafting(2), **captured(3))
    assert found == expected
    plan, layers = runner.weights.plan, runner.find(MtpSteps)
    assert plan is not None
    assert layers is not None
    assert (sorted(plan.captured), list(plan.failed_sizes), layers.layers.num_uncaptured) == ([6, 12], [], 0)
    assert runner.ran is not None
    assert any(is_captured for _, is_captured in runner.ran)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_narrow_caches_work_with_graphs(kv_dtype: str) -> None:
    """Steps are also checked at the start with `--ops cuda`."""
    sizes = {"max_model_len": 16, "kv_cache_dtype": kv_dtype}
    found = answers(on_card(GOLDEN / "llama", **sizes, **captured(1)))
    assert answers(on_card(GOLDEN / "llama", **sizes), is_alone=True, chunk=8) == found


@pytest.mark.slow
def test_prompt_steps_are_replayed() -> None:
    """One prompt in chunks and two whole ones, with sampled last tokens; with experts."""
    sizes: dict[str, Any] = {"max_model_len": 32}
    prompts = {**sizes, "graph_only_prefill": True, "cudagraph_capture_sizes": (16, 8), "max_cudagraph_capture_size": 16}
    runner = on_card(GOLDEN / "qwen3_moe", plan="captured", **prompts)
    expected = answers(on_card(GOLDEN / "qwen3_moe", **sizes))
    assert [answers(runner, is_alone=True, chunk=8), answers(runner)] == [expected] * 2
    assert runner.ran is not None
    assert {size for size, is_captured in runner.ran if is_captured} == {16, 8}


@pytest.mark.parametrize(("name", "quantization"), [("llama", "wint8"), ("qwen3_moe", "wint4")])
def test_rounded_weights_agree_with_their_numbers(name: str, quantization: str, tmp_path: Path) -> None:
    """Native ops compute a checkpoint of the numbers that they represent."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    is_tied = "lm_head.weight" not in tensors
    for tensor, values in tensors.items():
        is_head = tensor.startswith("lm_head") or (is_tied and "embed_tokens" in tensor)
        if "_proj." not in tensor and not is_head:
            continue
        fitting = [size for size in (64, 32) if values.shape[1] % size == 0]
        is_int8 = is_head or quantization == "wint8" or not fitting
        tensors[tensor] = float32(rounded(values, INT8 if is_int8 else WeightFormat("int4", fitting[0], is_folded=True)))
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"max_model_len": 32, "kv_cache_dtype": "float32"}
    found = answers(on_card(GOLDEN / name, quantization=quantization, **sizes))
    rounded_before = answers(on_host(tmp_path, **sizes))
    plain = answers(on_host(GOLDEN / name, **sizes))
    for answer, expected in zip(found, rounded_before, strict=True):
        assert answer[0] == expected[0]
        np.testing.assert_allclose(answer[1], expected[1], atol=1e-4)
    assert not np.allclose(found[0][1], plain[0][1], atol=1e-3), "they were rounded"


def test_memory_of_old_weights_is_given_back() -> None:
    """After a reload and after sleep, with captured steps."""
    runner = on_card(GOLDEN / "llama", max_model_len=32, **captured(1))

    def held() -> int:
        runner.device.release_unused()
        return runner.device.memory_bytes()

    answers(runner)
    whole = held()
    for version in (2, 3):
        runner.load(str(GOLDEN / "llama"), version, lambda num_done, num_bytes: None)
        found = answers(runner)
        assert held() <= whole
    num_weight_bytes = 4 * sum(tensor.size for tensor in load_file(GOLDEN / "llama" / "model.safetensors").values())
    runner.clear()
    assert held() <= whole - num_weight_bytes
    runner.load(str(GOLDEN / "llama"), 4, lambda num_done, num_bytes: None)
    assert answers(runner) == found


def test_graphs_share_their_memory() -> None:
    """Smaller sizes need no more than the largest, and steps of several sizes in turn have the same bits."""
    largest = {"plan": "captured", "cudagraph_capture_sizes": (8,), "max_cudagraph_capture_size": 8}
    several = {**largest, "cudagraph_capture_sizes": (8, 6, 4, 2)}
    sizes = {"max_model_len": 32, "max_num_seqs": 8}
    one, many = (on_card(GOLDEN / "llama", **sizes, **options) for options in (largest, several))
    for runner in (one, many):
        runner.device.release_unused()
    assert many.device.memory_bytes() <= 1.05 * one.device.memory_bytes()
    assert answers(many) == answers(one)
    assert answers(many, is_alone=True, chunk=5) == answers(one)


def test_missing_driver_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--ops cuda: no driver of NVIDIA's cards: .*; nvidia-smi shows whether"):
        on_card(GOLDEN / "llama", device_arena_library="/nowhere/libcuda.so.1")
