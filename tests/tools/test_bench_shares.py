"""Simulated shares of work: the schedule, and ops that are split for the given number of threads. Those of a whole step
are in `test_bench_step.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.array import Array, array_of
from ops.cpu.executors import Recording, Tape
from ops.cpu.table import make_table
from ops.modules import Linear
from tests.ops.packing import pack
from tests.ops.tables import table
from tools.bench.shares import Shares, finish, shares


@pytest.mark.parametrize(
    ("tasks_s", "num_threads", "expected_s"),
    [
        ([], 3, 0),
        ([5], 4, 5),
        ([1, 1, 1, 1], 2, 2),
        ([1, 1, 1], 2, 2),
        ([1, 1, 4], 2, 5),  # taken in their order: the long one comes last
        ([4, 1, 1], 2, 4),
        ([1] * 64, 64, 1),
    ],
)
def test_idle_thread_takes_the_next_task(tasks_s: list[float], num_threads: int, expected_s: float) -> None:
    assert finish(tasks_s, num_threads) == expected_s


def test_jobs_wait_for_each_other() -> None:
    once = [[2_000_000_000, 1_000_000_000, 1_000_000_000], [3_000_000_000]]
    slow = [[9_000_000_000, 1_000_000_000, 1_000_000_000], [3_000_000_000]]
    found = shares([once, slow, once], 2)
    assert found == Shares(num_barriers=1, num_tasks=4, busy_s=7.0, finish_s=2.0 + 3.0)
    assert found.efficiency(2) == 0.7
    assert found + found == Shares(2, 8, 14.0, 10.0)


def linear_tape(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[Tape, Array]:
    recording = Recording()
    k = make_table(recording)
    module = Linear(("w",), num_inputs, (num_outputs,))
    pack(k, module, weight=np.ones((num_outputs, num_inputs), np.float32))
    y = k.linear(array_of(np.random.default_rng(0).standard_normal((num_rows, num_inputs), np.float32)), module)
    return recording.finish(y), y


@pytest.mark.parametrize("num_rows", [1, 16])
def test_64_panels_are_split_evenly_among_threads(num_rows: int) -> None:
    """A power of two of threads divides their number, so that all end at once; a few panels each, one for 64 threads."""
    with table("portable-1"):
        tape, _ = linear_tape(num_rows, 512, 1024)
        found = {num_threads: tape.replay_alone(num_threads)[0] for num_threads in (2, 4, 8, 16, 32, 64)}
    assert {num_threads: len(jobs[-2]) for num_threads, jobs in found.items()} == {2: 16, 4: 16, 8: 16, 16: 16, 32: 32, 64: 64}
    assert all(len(jobs[-1]) == 1 and jobs[-1][0] >= 0 for jobs in found.values())


def test_alone_is_the_same_result() -> None:
    with table("portable-2"):
        tape, y = linear_tape(40, 128, 1024)
        tape.replay()
        expected = y.numpy().copy()
        for num_threads in (1, 5, 64):
            y.numpy()[...] = 0
            tape.replay_alone(num_threads)
            np.testing.assert_array_equal(y.numpy(), expected)
        assert _cpu.num_threads() == 2
