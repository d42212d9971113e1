"""Chosen kernels, their measured speed, and its share of the peak, for `tokamak bench step`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ops import _cpu
from ops.cpu.choice import ATTENTION
from ops.cpu.rates import operations
from tools.bench.roofline import Peak, measure_peaks
from tools.units import share
from workers.devices.kernels import kernels, timing

TITLE = "kernels, GFLOP/s of a thread at 1, 16 and 128 rows, 1 and 64 queries"


class KernelRates:
    """Speed of kernels on one thread. `choose` is called when options are resolved, `measure_peaks` before the threads of a
    step are created."""

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.peaks: dict[str, Peak] = {}

    def choose(self, asked: str, kv_dtype: str, directory: Path) -> dict[str, str]:
        self.chosen = kernels(asked, kv_dtype, directory)
        self.seconds = timing(directory).seconds
        return self.chosen

    def measure_peaks(self) -> None:
        """Measure the peaks by CPU time of the thread, like the kernels."""
        _cpu.set_num_threads(1)
        self.peaks = measure_peaks(time.thread_time)

    def document(self) -> dict[str, Any]:
        """Return the rates for JSON output."""
        return {
            "chosen": self.chosen,
            "operations_per_s": {
                part: {variant: self._rates(part, variant) for variant in times} for part, times in self.seconds.items()
            },
            "best_units": {kind: [peak.unit, peak.variant, peak.operations_per_s] for kind, peak in self.peaks.items()},
        }

    def _rates(self, part: str, variant: str) -> list[float]:
        return [count / each_s for count, each_s in zip(operations(part), self.seconds[part][variant], strict=True)]

    def table(self, kinds: Iterable[str], kv_dtype: str) -> Table:
        """Return a table with a row for each variant of the parts of a step: linears over weights of these `kinds`, and
        attention."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=TITLE, title_justify="left")
        for column in ("part", "variant", "", "few", "some", "many", "best unit", "of it"):
            table.add_column(column, justify="right" if column in ("few", "some", "many", "of it") else "left", no_wrap=True)
        for part in (*sorted(kinds), f"{ATTENTION} {kv_dtype}"):
            kind = part.removeprefix(f"{ATTENTION} ")
            is_attention = kind != part
            peak = self.peaks["bfloat16" if is_attention and kind == "int8" else kind]
            for variant in self.seconds.get(part, {}):
                rates = self._rates(part, variant)
                cells = [f"{rate / 1e9:.0f}" for rate in rates]
                if is_attention:
                    cells.insert(1, "")
                mark = "chosen" if self.chosen[ATTENTION if is_attention else part] == variant else ""
                unit = f"{peak.operations_per_s / 1e9:.0f} {peak.unit}"
                table.add_row(part, variant, mark, *cells, unit, share(max(rates) / peak.operations_per_s))
        return table
