"""Measured limits of this machine: memory bandwidth, and the rate of the arithmetic units, on all threads.

Used by `tokamak bench step`, in the same process and on the same threads as the ops that are compared with it. A format is
compared with the fastest unit that its kernels could use, of any variant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ops import _cpu
from ops.cpu.work import Work

MIN_BUFFER_BYTES = 256 << 20
MEASURE_S = 0.25
UNIT_MEASURE_S = 0.05
UNIT_TURNS = 5000  # a tenth of a millisecond
UNITS = {
    "float32": ("float32 FMA",),
    "bfloat16": ("float32 FMA", "bfloat16 dot", "bfloat16 tiles"),
    "int8": ("int8 dot", "int8 tiles"),
    "int4": ("int8 dot", "int4 dot", "int8 tiles"),
}

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Peak:
    """The fastest of a format's units."""

    unit: str
    variant: str
    operations_per_s: float  # a multiply-add is two


@dataclass(frozen=True, slots=True)
class Roofline:
    bytes_per_s: float
    peaks: dict[str, Peak]  # of each kind of weights

    def bounds_s(self, work: Work) -> dict[str, float]:
        """Return the minimum times by memory and by arithmetic."""
        compute_s = work.num_operations / self.peaks[work.format.kind].operations_per_s if work.num_operations else 0.0
        return {"memory": work.num_bytes / self.bytes_per_s, "compute": compute_s}


def measure() -> Roofline:
    return Roofline(_bytes_per_s(), measure_peaks())


def measure_peaks(clock: Clock = time.perf_counter) -> dict[str, Peak]:
    """Return the peak for each kind of weights, on the present threads, in seconds of `clock`."""
    found = [
        Peak(unit, variant, _operations_per_s(variant, unit, clock))
        for variant in _cpu.candidates()
        for unit in _cpu.units(variant)
    ]
    return {
        kind: max((peak for peak in found if peak.unit in units), key=lambda peak: peak.operations_per_s)
        for kind, units in UNITS.items()
    }


def _bytes_per_s() -> float:
    """Measure by reading a buffer that fits in no cache."""
    buffer = np.ones(max(MIN_BUFFER_BYTES, 4 * _cache_bytes()), np.uint8)
    best_s = _best_s(lambda: _cpu.read_memory(int(buffer.ctypes.data), buffer.nbytes), MEASURE_S, time.perf_counter)
    return buffer.nbytes / best_s


def _cache_bytes() -> int:
    """Return the bytes of the largest cache; 0 if unknown."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().removesuffix("K\n")) << 10 for size in sizes), default=0)


def _operations_per_s(variant: str, unit: str, clock: Clock) -> float:
    def run() -> int:
        return _cpu.run_unit(variant, unit, UNIT_TURNS)

    return run() / _best_s(run, UNIT_MEASURE_S, clock)


def _best_s(run: Callable[[], object], measure_s: float, clock: Clock) -> float:
    """Return the shortest of as many runs as fit in `measure_s`, after one to warm up."""
    run()
    best_s, deadline_s = float("inf"), clock() + measure_s
    while (begin_s := clock()) < deadline_s:
        run()
        best_s = min(best_s, clock() - begin_s)
    return best_s
