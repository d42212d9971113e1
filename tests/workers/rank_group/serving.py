"""Rank of a rank group in tests of tensor parallelism: the same sequences on runners with its share of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.messages import SamplingParams
from ops import _cpu
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers.serving import ServedSequence, Serving, golden_sequences, make_runner
from workers.rank_group.communicator import Communicator

PROMPTS = [[(7 * number + 3 * index) % 900 + 3 for index in range(length)] for number, length in enumerate((1, 5, 33, 90, 17))]
SAMPLINGS = (
    SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, num_logprobs=0),
    SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, num_logprobs=5),
    SamplingParams(temperature=1.3, top_k=20, seed=2),
)

Answers = list[tuple[object, ...]]


def sequences(count: int = len(PROMPTS), num_outputs: int = 8) -> list[ServedSequence]:
    """Return the first `count` of sequences of all kinds."""
    return [
        ServedSequence(prompt, sampling, num_outputs)
        for prompt, sampling in zip(PROMPTS[:count], SAMPLINGS[:count], strict=True)
    ]


def serve(
    path: Path, options: dict[str, Any], communicator: Communicator | None = None, arena: memoryview | None = None
) -> Answers:
    """Run sequences of all kinds in one batch, with prompts in chunks; return the outcome of each, with drafts also the number
    of tokens per row. `variant`: of the kernels; `adapters`: used by the sequences in turn, after one without; `sequences`:
    number of sequences and of their tokens."""
    before = _cpu.variant()
    assert _cpu.select(options.get("variant", before))
    settings = {name: value for name, value in options.items() if name not in ("variant", "sequences")}
    runner = make_runner(path, communicator=communicator, arena=arena, num_kv_blocks=64, **settings)
    serving = Serving(runner, chunk=40)
    batch = sequences(*options.get("sequences", ()))
    for slot, sequence in enumerate(batch):
        sequence.adapter_slot = slot % (1 + len(options.get("adapters", ()))) - 1
        serving.place(sequence, slot)
    serving.run(batch)
    assert _cpu.select(before)
    counts: Answers = [(tuple(serving.num_tokens_of_rows),)] if "speculative_config" in options else []
    return [*(sequence.answer() for sequence in batch), *counts]


def serve_all(communicator: Communicator, arena: tuple[Any, int], jobs: Sequence[tuple[Path, dict[str, Any]]]) -> list[Answers]:
    """Run one rank: every job on a runner of its own, with the arena that the ranks share."""
    memory = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    found = []
    for path, options in jobs:
        num_calls = communicator.native.num_calls
        found.append(serve(path, options, communicator, memory))
        assert communicator.native.num_calls > num_calls
    return found


def serve_golden(
    communicator: Communicator, arena: tuple[Any, int], architectures: Sequence[str], options: dict[str, Any]
) -> dict[str, list[list[int]]]:
    """Run one rank: return the outputs of each architecture's golden prompts."""
    memory = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    found = {}
    for architecture in architectures:
        sequences = golden_sequences(architecture)[:6]
        runner = make_runner(GOLDEN / architecture, communicator=communicator, arena=memory, num_kv_blocks=200, **options)
        serving = Serving(runner)
        for slot, sequence in enumerate(sequences):
            serving.place(sequence, slot)
        serving.run(sequences)
        found[architecture] = [sequence.outputs for sequence in sequences]
    return found
