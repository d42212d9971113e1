"""The thread pool of a rank: alone, at full speed, without Python; and the work that wakes its threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_program import run_program
from tests.paths import REPOSITORY

WAKE = """
import os, sys, time
from functools import partial
import numpy as np
from ops import _cpu
from ops.cpu.executors import Recording
from ops.cpu.packing import pack
from ops.cpu.table import make_table
from ops.modules import Linear
from ops.weight_format import Memory, WeightFormat

def linear(inputs, outputs):
    module = Linear(("only",), inputs, (outputs,), format=WeightFormat("float32"))
    pack(module, {"weight": partial(np.ones, (outputs, inputs), np.float32)}, Memory())
    recording = Recording()
    return recording.finish(make_table(recording).linear(np.ones((1, inputs), np.float32), module))

small, large = linear(128, 768), linear(1024, 2048)
before = set(os.listdir("/proc/self/task"))
_cpu.set_num_threads(2)
(helper,) = set(os.listdir("/proc/self/task")) - before

def naps():
    status = open(f"/proc/self/task/{helper}/status").read()
    return "sleeping" in status, int(status.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])

def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

wait_for(lambda: naps()[0] and naps()[1] > 0)
asleep = naps()
for _ in range(20):
    small.replay()
assert naps() == asleep, (naps(), asleep)
large.replay()
wait_for(lambda: naps()[1] > asleep[1])
print("as it should be")
"""


@pytest.mark.slow
def test_every_task_runs_once_and_is_finished(tmp_path: Path) -> None:
    printed = run_program(tmp_path, "40000", "tests/ops/native/pool_stress.cpp", "ops/cpu/native/pool.cpp")
    assert printed == "0 wrong of 40000\n"


def test_sleeping_thread_wakes_only_for_much_work() -> None:
    """Steps of a small model leave the other cores to the engine's other processes."""
    done = subprocess.run([sys.executable, "-c", WAKE], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == "as it should be\n", done.stderr
