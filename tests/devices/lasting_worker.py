"""A rank whose cache is memory of a card, by the stand-in for its driver: Paddle's CPU place takes the addresses, which are the
host's. Run by `test_device_arena.py`."""

from __future__ import annotations

import functools
from typing import Any

from engine.messages import SamplingParams
from tests.paths import GOLDEN
from tests.workers.serving import Sample, Serving, make_runner
from workers.runners.gpu import gpu_runner


def serve(library: str, descriptor: int, num_bytes: int, has_blocks: bool) -> dict[str, Any]:
    """The answer to a prompt of 40 tokens; `has_blocks`: without computing the first two blocks."""
    kind = functools.partial(gpu_runner, device_arena=descriptor)
    arena = memoryview(bytearray(num_bytes))
    options = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4, "ops": "reference"}
    runner = make_runner(GOLDEN / "qwen3", kind=kind, arena=arena, device_arena_library=library, **options)
    assert runner.device.capabilities.is_arena_lasting
    assert not any(arena), "nothing lies on the host"
    serving = Serving(runner)
    sample = Sample([5, 9, 3, 30, 22] * 8, SamplingParams(temperature=0.0), 12)
    if has_blocks:
        serving.next_block = 3
    serving.place(sample, 0, [1, 2] if has_blocks else None)
    num_computed = sample.num_computed
    serving.run([sample])
    assert not any(arena)
    return {"outputs": sample.outputs, "num_computed": num_computed, "logprobs": sample.logprobs}
