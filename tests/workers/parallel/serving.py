"""What each rank of a gang runs in tests of tensor parallelism: the same samples on a runner with its share of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.messages import SamplingParams
from shm.segment import MemoryFile
from tests.workers.serving import Sample, Serving, make_runner
from workers.parallel.communicator import Communicator

PROMPTS = [[(7 * number + 3 * index) % 900 + 3 for index in range(length)] for number, length in enumerate((1, 5, 33, 90, 17))]
SAMPLINGS = (
    SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, num_logprobs=0),
    SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, num_logprobs=5),
    SamplingParams(temperature=1.3, top_k=20, seed=2),
)


def samples() -> list[Sample]:
    return [Sample(prompt, sampling, 8) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


def serve(communicator: Communicator | None, path: Path, arena: Any, options: dict[str, Any]) -> list[Any]:
    """All samples in one batch, whose prompts are cut into chunks; what came of each."""
    memory = None if arena is None else MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    runner = make_runner(path, communicator=communicator, arena=memory, **options)
    serving, batch = Serving(runner, chunk=40), samples()
    for slot, sample in enumerate(batch):
        serving.place(sample, slot)
    serving.run(batch)
    return [sample.answer() for sample in batch]
