"""What this machine can do at most, measured: bytes from memory and multiply-adds of each weight format, on all threads.

Used by `tokamak bench step`, in the same process and on the same threads as what it is held against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ops import _cpu
from ops.cpu.array import array_of
from ops.cpu.executors import Recording
from ops.cpu.table import make_table
from ops.cpu.work import Work
from ops.modules import Linear
from ops.weight_format import Memory, WeightFormat

MIN_BUFFER_BYTES = 256 << 20
MEASURE_S = 0.25
PROBE_ROWS = 192
PROBE_INPUTS = 512
PROBE_OUTPUTS = 384  # for each thread: what a thread works on stays in its second cache


@dataclass(frozen=True, slots=True)
class Roofline:
    bytes_per_s: float
    operations_per_s: dict[WeightFormat, float]  # a multiply-add is two

    def bounds_s(self, work: Work) -> dict[str, float]:
        """The least time that memory, and that arithmetic, allow."""
        compute_s = work.num_operations / self.operations_per_s[work.format] if work.num_operations else 0.0
        return {"memory": work.num_bytes / self.bytes_per_s, "compute": compute_s}


def measure(formats: Iterable[WeightFormat]) -> Roofline:
    return Roofline(_bytes_per_s(), {weight_format: _operations_per_s(weight_format) for weight_format in formats})


def _bytes_per_s() -> float:
    """Reading a buffer that no cache holds."""
    buffer = np.ones(max(MIN_BUFFER_BYTES, 4 * _cache_bytes()), np.uint8)
    return buffer.nbytes / _best_s(lambda: _cpu.read_memory(int(buffer.ctypes.data), buffer.nbytes))


def _cache_bytes() -> int:
    """Of the largest cache; 0 where the kernel does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().removesuffix("K\n")) << 10 for size in sizes), default=0)


def _operations_per_s(weight_format: WeightFormat) -> float:
    """A linear of many rows whose weights stay in the caches: the kernel's own inner loop and what it needs around it."""
    num_outputs = PROBE_OUTPUTS * _cpu.num_threads()
    generator = np.random.default_rng(0)
    module = Linear(("probe",), PROBE_INPUTS, (num_outputs,), format=weight_format)
    recording = Recording()
    k = make_table(recording)
    weight = generator.standard_normal((num_outputs, PROBE_INPUTS), np.float32)
    k.pack(module, {"weight": partial(np.asarray, weight)}, Memory())
    x = array_of(generator.standard_normal((PROBE_ROWS, PROBE_INPUTS), np.float32))
    tape = recording.finish(k.linear(x, module))
    return 2 * PROBE_ROWS * PROBE_INPUTS * num_outputs / _best_s(tape.replay)


def _best_s(run: Callable[[], object]) -> float:
    """The shortest of as many runs as fit into MEASURE_S, after one to warm up."""
    run()
    best_s, deadline_s = float("inf"), time.perf_counter() + MEASURE_S
    while (begin_s := time.perf_counter()) < deadline_s:
        run()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s
