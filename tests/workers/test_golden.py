"""The reference outputs of transformers, with every way to chunk, batch, cache and repeat the work: the same tokens,
log-probabilities within 1e-3, and the same bits for all ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import SpeculativeConfig
from tests.paths import RECURRENT_MODELS
from tests.workers.checkpoints import write_checkpoint
from tests.workers.serving import ARCHITECTURES, GOLDEN, ServedSequence, Serving, golden_cases, golden_sequences, make_runner
from workers.engine.runner import ModelRunner


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


BACKENDS = {
    "reference": {"ops": "reference", "plan": "eager"},
    "native, op by op": {"ops": "native", "plan": "eager"},
    "native": {"ops": "native", "plan": "tape"},
    "native, two threads": {"ops": "native", "plan": "tape", "threads": 2},
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def runner_of(architecture: str, backend: str) -> ModelRunner:
    return make_runner(GOLDEN / architecture, **BACKENDS[backend])


def side_by_side(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
    serving = Serving(runner)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)


def alone(size: int) -> Callable[[ModelRunner, list[ServedSequence]], None]:
    """Run one after the other, in chunks of `size`."""

    def way(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
        serving = Serving(runner, chunk=size)
        for sequence in sequences:
            serving.place(sequence, 7)
            serving.run([sequence])

    return way


def together(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
    """Run thirty-one at once (the longest prompts fill most of a step), mixed with prompts that are still computed."""
    serving = Serving(runner, budget=200, chunk=100)
    copies = [ServedSequence(sequence.prompt, sequence.sampling) for sequence in sequences for _ in range(5)]
    everyone = [*copies, *sequences]
    for slot, sequence in enumerate(everyone):
        serving.place(sequence, slot)
    serving.run(everyone)
    for index, copy in enumerate(copies):
        assert copy.answer() == sequences[index // 5].answer()


def with_cached_prefix(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
    """Reuse the blocks of an earlier, equal prompt. Prompt log-probabilities exist only for the rest, so the others are taken
    from the earlier one."""
    for sequence in sequences:
        serving = Serving(runner)
        first = ServedSequence(sequence.prompt, sequence.sampling, num_outputs=1)
        serving.place(first, 3)
        serving.run([first])
        num_blocks = (len(sequence.prompt) - 1) // serving.block_size
        serving.place(sequence, 4, cached_blocks=first.block_ids[:num_blocks])
        serving.run([sequence])
        for position, value in first.prompt_logprobs.items():
            assert sequence.prompt_logprobs.setdefault(position, value) == value


def with_preemption(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
    """Each sequence loses its blocks after 9 outputs and computes everything again, in other blocks and chunks."""
    serving = Serving(runner)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    while any(len(sequence.outputs) < 9 for sequence in sequences):
        serving.step([sequence for sequence in sequences if len(sequence.outputs) < 9])
    again = Serving(runner, chunk=11)
    again.next_block = 300
    for slot, sequence in enumerate(sequences):
        again.place(sequence, 20 - slot)
    again.run(sequences)


def steps_run_twice(runner: ModelRunner, sequences: list[ServedSequence]) -> None:
    """Dispatch every step again, as after a crash that lost its result."""
    serving = Serving(runner, chunk=64)
    run = runner.run

    class Twice:
        config, slots, draft = serving.runner.config, serving.runner.slots, serving.runner.draft

        def run(self, step):  # type: ignore[no-untyped-def]
            first, second = run(step), run(step)
            assert (first.token_ids, first.logprobs, first.top_rows) == (second.token_ids, second.logprobs, second.top_rows)
            return second

    serving.runner = Twice()  # type: ignore[assignment]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)


WAYS: dict[str, Callable[[ModelRunner, list[ServedSequence]], None]] = {
    "whole": alone(512),
    "chunks of 16": alone(16),
    "chunks of 5": alone(5),
    "together": together,
    "cached prefix": with_cached_prefix,
    "preemption": with_preemption,
    "steps run twice": steps_run_twice,
}


@functools.cache
def plain(architecture: str, backend: str) -> list[ServedSequence]:
    """Return the sequences that each way is compared with; a fixture would compute them again for every case with a backend of
    its own."""
    sequences = golden_sequences(architecture)
    side_by_side(runner_of(architecture, backend), sequences)
    return sequences


def test_golden_models_agree_with_transformers(architecture: str, backend: str) -> None:
    check_golden(plain(architecture, backend), architecture)


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_recurrent_models_agree_with_transformers(name: str) -> None:
    """Side by side, and in chunks of two sizes, the same bits."""
    ways = []
    for way in (side_by_side, alone(16), alone(5)):
        way(make_runner(GOLDEN / name), sequences := golden_sequences(name))
        ways.append(sequences)
    check_golden(ways[0], name)
    first, *others = ([sequence.answer() for sequence in sequences] for sequences in ways)
    assert others == [first] * 2


def check_golden(sequences: list[ServedSequence], architecture: str) -> None:
    for sequence, case in zip(sequences, golden_cases(architecture), strict=True):
        assert sequence.outputs == case["greedy_token_ids"]
        for (ids, values), expected in zip(sequence.tops, case["top_logprobs"], strict=True):
            np.testing.assert_allclose(values, [value for _, value in expected], atol=1e-3)
            assert ids[0] == expected[0][0]
        for position, value in enumerate(case.get("prompt_logprobs") or []):
            if value is not None:
                assert sequence.prompt_logprobs[position] == pytest.approx(value, abs=1e-3)
        assert sorted(sequence.prompt_logprobs) == list(range(1, len(sequence.prompt)))
        assert sequence.ranks == [1] * len(sequence.outputs)


@pytest.mark.slow
def test_plans_and_thread_counts_agree(architecture: str) -> None:
    """Recorded or op by op, with any number of threads: the same bits."""
    answers = []
    for backend in list(BACKENDS)[1:]:
        sequences = golden_sequences(architecture)
        together(runner_of(architecture, backend), sequences)
        answers.append([sequence.answer() for sequence in sequences])
    assert answers[0] == answers[1] == answers[2]


def is_like_another(architecture: str) -> bool:
    """Return whether all of its ops are those of other golden models."""
    return "moe" in architecture or architecture in ("mixtral", "phi3")


# The ways are the runner's: with the plan that engines have, each architecture takes all, with the others those that mix most.
# The reference ops are the same for all architectures and slow: these take one all together, and one with latents, whose
# attention is another, cut and repeated. So are experts those of all that have some: one takes every way.
MIXED = ("chunks of 5", "together", "preemption")
CASES = [
    (architecture, backend, way)
    for architecture in ARCHITECTURES
    for backend in BACKENDS
    for way in WAYS
    if backend != "reference" or (architecture, way) in (("qwen3", "together"), ("deepseek_v3", "preemption"))
    if backend in ("native", "reference") or way in MIXED
    if not is_like_another(architecture) or (backend == "native" and (architecture == "ernie4_5_moe" or way == "together"))
]


@pytest.mark.parametrize(("architecture", "backend", "way"), CASES)
def test_answers_have_the_same_bits_in_any_batch(architecture: str, backend: str, way: str) -> None:
    sequences = golden_sequences(architecture)
    WAYS[way](runner_of(architecture, backend), sequences)
    for sequence, expected in zip(sequences, plain(architecture, backend), strict=True):
        assert sequence.answer() == expected.answer()


SINKS: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20, "max_position_embeddings": 4096},
}
PACKED = {**SINKS, "quantization_config": {"quant_method": "mxfp4"}}
NARROW = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
OF_SINKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": (SINKS, {}),
    "bfloat16": (SINKS, NARROW),
    "int8": (SINKS, {"quantization": "wint8", "kv_cache_dtype": "int8"}),
    "int4": (SINKS, {"quantization": "wint4"}),
    "mxfp4": (PACKED, {}),
    "mxfp4, bfloat16": (PACKED, NARROW),
}


@pytest.mark.parametrize("precision", OF_SINKS)
def test_attention_sinks_have_the_same_bits_in_any_batch(precision: str, tmp_path: Path) -> None:
    """In every way, and with drafts; experts with biases, in MXFP4 too."""
    config, options = OF_SINKS[precision]
    write_checkpoint(tmp_path, config)
    expected = golden_sequences("llama")
    side_by_side(make_runner(tmp_path, **options), expected)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
    ways = [(WAYS[way], {}) for way in ("chunks of 16", "together", "cached prefix", "preemption", "steps run twice")]
    for way, more in [*ways, (side_by_side, {"speculative_config": drafts})]:
        sequences = golden_sequences("llama")
        way(make_runner(tmp_path, **options, **more), sequences)
        assert [sequence.answer() for sequence in sequences] == [sequence.answer() for sequence in expected]
