"""`tools/test --device gpu --rows`: checks and times each CUDA row on a card. Needs only its driver: the script installs NVRTC
from PyPI, which compiles the kernels, and no framework is needed.

Each row first runs on small operands, and the result is compared with that of the same sources compiled for this machine's
processor (`ops/cuda/emulation.h`, which the tests compare with the formulas). Then it runs at the sizes of models and is timed:
its bytes and its arithmetic as a share of the card's measured limits, which are copies within its memory and sums that stay in
registers (the row `Peak`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.checkpoint.files import user_cache
from ops.cuda.library import BuildError, Library, RowError, build, host_command
from ops.cuda.operands import ROWS, TYPES, operands
from tools.device.card import Card, CardError
from tools.device.case import Case
from tools.device.cases import WITHOUT_CASES, cases
from workers.devices.card_kernels import card_library

_COPIED_BYTES = 256 << 20
_PEAK_STEPS, _PEAK_BLOCKS = 4096, 2048
RUNS = 20  # of a row in a batch


class Roofline(msgspec.Struct, frozen=True):
    """Measured rates of a card, per second."""

    num_bytes: float
    operations: dict[str, float]  # by type

    def share(self, case: Case, seconds: float) -> float:
        """Return the minimum time of the case as a share of the measured time."""
        of_bytes, of_operations = case.num_bytes / self.num_bytes, case.num_operations / self.operations[case.dtype]
        return max(of_bytes, of_operations) / seconds


class Placed:
    """Operands of a case on a card, until `free`."""

    def __init__(self, card: Card, case: Case) -> None:
        self._card, self._case = card, case
        self._addresses: dict[int, tuple[int, np.ndarray]] = {}  # by the array's identity
        self.operands = operands(case.row, self._describe, **case.values)

    def _describe(self, array: np.ndarray) -> tuple[int, int]:
        if id(array) not in self._addresses:
            address = self._card.allocate(array.nbytes)
            self._addresses[id(array)] = address, array
            self._card.send(array, address)
        return self._addresses[id(array)][0], array.nbytes

    def memory(self) -> list[tuple[int, int]]:
        """Return address and bytes of each array."""
        return [(address, array.nbytes) for address, array in self._addresses.values()]

    def outcome(self) -> dict[str, np.ndarray]:
        return {
            name: self._card.fetch(self._addresses[id(array)][0], array) for name, array in arrays_of(self._case.values).items()
        }

    def free(self) -> None:
        for address, _ in self._addresses.values():
            self._card.free(address)


def arrays_of(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of an operand by names such as `cache.keys`."""
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{part}": array for part, array in arrays_of(value).items()}
        elif isinstance(value, np.ndarray):
            found[name] = value
    return found


def check(card: Card, rows: Library, emulated: Library, case: Case) -> str:
    """Return the difference; empty: none."""
    placed = Placed(card, case)
    try:
        rows.run(case.row, placed.operands)
        found = case.compared(placed.outcome())
    finally:
        placed.free()
    emulated.run(case.row, operands(case.row, lambda array: (array.ctypes.data, array.nbytes), **case.values))
    for number, (own, expected) in enumerate(zip(found, case.compared(arrays_of(case.values)), strict=True)):
        if expected.dtype.kind != "f":
            if not np.array_equal(own, expected):
                return f"{(own != expected).sum()} of {expected.size} whole numbers differ (of outcome {number})"
            continue
        largest = max(np.abs(expected).max(), 1e-30)
        with np.errstate(invalid="ignore", over="ignore"):  # what earlier work may have left there
            error = np.abs(own - expected).max() / largest
        if not error <= case.tolerance:  # nor NaN
            return f"off by {error:.2g} of the largest number (of outcome {number})"
    return ""


def measure(card: Card, rows: Library, copied_bytes: int, steps: int, blocks: int) -> Roofline:
    here, there = (card.allocate(copied_bytes) for _ in range(2))
    of_copies = 2 * copied_bytes / card.seconds(lambda: card.copy(there, here, copied_bytes), 5)
    operations = {}
    for dtype in ("float32", "float16", "bfloat16"):
        sums = np.zeros(blocks * 256, np.float32)
        values = {"type": TYPES[dtype], "sums": sums, "num_blocks": blocks, "num_steps": steps}
        placed = Placed(card, Case("Peak", dtype, values, lambda outcome: [], 0))
        of_step = 256 * 4 * 2 if dtype == "float32" else 256 // 32 * 2 * 16 * 16 * 8
        seconds = card.seconds(partial(rows.run, "Peak", placed.operands), 2)
        operations[dtype] = 8 * of_step * steps * blocks / seconds
        placed.free()
    card.free(here)
    card.free(there)
    return Roofline(of_copies, operations)


class Timed(msgspec.Struct, frozen=True):
    """A row with the operands of a case, on a measured card."""

    case: Case
    seconds: float
    roofline: Roofline

    @property
    def bandwidth_share(self) -> float:
        return self.case.num_bytes / self.seconds / self.roofline.num_bytes

    @property
    def line(self) -> str:
        case, seconds = self.case, self.seconds
        rates = f"{case.num_bytes / seconds / 1e9:.1f} | {case.num_operations / seconds / 1e12:.2f}"
        return f"| {case.row} | {case.text} | {seconds * 1e6:.1f} | {rates} | {self.roofline.share(case, seconds):.2f} |"


def time(card: Card, rows: Library, case: Case, roofline: Roofline, num_runs: int) -> Timed:
    placed = Placed(card, case)
    try:
        return Timed(case, card.seconds(lambda: rows.run(case.row, placed.operands), num_runs), roofline)
    finally:
        placed.free()


def directory(*, is_small: bool) -> Path:
    """Return where the rows are built: where engines look for them, or in the checkout on what is no card."""
    return Path("build") / "cuda" if is_small else user_cache() / "cuda"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 if a row is wrong, 2 if nothing could be run."""
    parser = argparse.ArgumentParser(prog="tools/test --device gpu --rows", description=__doc__.split("\n\n")[0])
    parser.add_argument("--driver", default="libcuda.so.1", help="the driver's library (default: %(default)s)")
    parser.add_argument("--card", type=int, default=0, help="which card (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="time what is checked, on what is no card")
    parser.add_argument("--checks", action="store_true", help="check the rows without timing them")
    options = parser.parse_args(arguments)
    try:
        card = Card(options.driver, options.card)
        rows = card_library(card.driver, directory(is_small=options.small))
        passed, failed = run_checks(card, rows, cases(is_large=False), is_small=options.small)
        if not options.checks:
            run_timings(card, rows, is_small=options.small)
        print(f"\n{passed} of {passed + failed} checks passed")
        return int(failed > 0)
    except (CardError, BuildError, RowError, OSError) as error:
        print(f"tools/test --device gpu --rows: {error}", file=sys.stderr)
        return 2


def run(card: Card, rows: Library, *, is_small: bool) -> tuple[int, int, list[Timed]]:
    """Check and time all rows, print the results, and return how many were right and wrong, and the times."""
    return *run_checks(card, rows, cases(is_large=False), is_small=is_small), run_timings(card, rows, is_small=is_small)


def run_checks(card: Card, rows: Library, checked: Sequence[Case], *, is_small: bool) -> tuple[int, int]:
    """Check cases of all rows, print the results, and return how many were right and wrong."""
    expected = emulation(is_small=is_small)
    assert {case.row for case in checked} == set(ROWS) - WITHOUT_CASES, "a row has no case"
    failed = 0
    for case in checked:
        wrong = check(card, rows, expected, case)
        failed += bool(wrong)
        print(f"{'wrong' if wrong else 'right'}: {case.row}, {case.text}{': ' if wrong else ''}{wrong}", flush=True)
    return len(checked) - failed, failed


def emulation(*, is_small: bool) -> Library:
    """Return the rows compiled for this machine's processor."""
    return Library(build(host_command(), directory(is_small=is_small)))


def roofline_of(card: Card, rows: Library, *, is_small: bool) -> Roofline:
    return measure(card, rows, *((1 << 20, 2, 2) if is_small else (_COPIED_BYTES, _PEAK_STEPS, _PEAK_BLOCKS)))


def run_timings(card: Card, rows: Library, *, is_small: bool) -> list[Timed]:
    """Time all rows and print the results."""
    roofline = roofline_of(card, rows, is_small=is_small)
    peaks = ", ".join(f"{rate / 1e12:.1f} TFLOP/s {dtype}" for dtype, rate in roofline.operations.items())
    print(f"\n{card.name}: {roofline.num_bytes / 1e9:.0f} GB/s, {peaks}\n")
    print("| row | with | us | GB/s | TFLOP/s | share of the roofline |\n|---|---|---|---|---|---|")
    timed = []
    for case in cases(is_large=not is_small):
        timed.append(time(card, rows, case, roofline, 1 if is_small else RUNS))
        print(timed[-1].line, flush=True)
    return timed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
