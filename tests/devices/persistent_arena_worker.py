"""A rank with its cache in memory of a card: of a real one, or of the stand-in for its driver, where Paddle's CPU place takes
the addresses, which are the host's. Run by `test_device_arena.py` and by `tools/device/whole.py`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

from engine.messages import SamplingParams
from tests.paths import GOLDEN, REPOSITORY
from tests.workers.serving import ServedSequence, Serving, make_runner
from workers.assembly import RunnerParts
from workers.runners import Ahead, gpu_runner

NUM_BYTES = 9 << 20  # of an arena that has room for it
# Computes a prompt, prints its answer and then waits for its death; or goes on from the blocks that are there.
_WORKER = """
import json, sys
from tests.devices.persistent_arena_worker import serve
print(json.dumps(serve(*json.loads(sys.argv[1]))), flush=True)
sys.stdin.read()
"""


def run_worker(library: str, descriptor: int, device: str = "cpu", *, has_blocks: bool) -> dict[str, Any]:
    """Return the report of a worker on the arena `descriptor`, which is then killed."""
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _WORKER, json.dumps([library, descriptor, has_blocks, device])],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[descriptor],
    )
    with worker:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        worker.send_signal(signal.SIGKILL)
    found: dict[str, Any] = json.loads(line)
    return found


def serve(library: str, descriptor: int, has_blocks: bool, device: str) -> dict[str, Any]:
    """Return the answer to a prompt of 40 tokens; `has_blocks`: without computing the first two blocks."""

    def kind(parts: RunnerParts) -> Ahead:
        return gpu_runner(replace(parts, device_arena=descriptor))

    arena = memoryview(bytearray(NUM_BYTES))
    options = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4, "ops": "fused", "device": device}
    runner = make_runner(GOLDEN / "qwen3", kind=kind, arena=arena, device_arena_library=library, **options)
    assert runner.device.capabilities.is_arena_lasting
    assert not any(arena), "nothing lies on the host"
    serving = Serving(runner)
    sequence = ServedSequence([5, 9, 3, 30, 22] * 8, SamplingParams(temperature=0.0), 12)
    if has_blocks:
        serving.next_block = 3
    serving.place(sequence, 0, [1, 2] if has_blocks else None)
    num_computed = sequence.num_computed
    serving.run([sequence])
    assert not any(arena)
    return {"outputs": sequence.outputs, "num_computed": num_computed, "logprobs": sequence.logprobs}
