"""Utilization of the multiply units by prefill attention, including softmax:

    python -m tools.bench.attention [--variant avx512bf16 ...] [--dtype bfloat16 ...] [--rounds 7]

One thread, timed by its CPU time. The peak of a unit is measured in turn with the op, and the best of all rounds counts for
both. Keys, values and queries are each in one block of memory, like those of a new sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ops import _cpu
from ops.cpu.choice import KV_TYPES
from ops.cpu.rates import attention
from tools.units import share

HEADS = ((16, 8, 128), (16, 4, 64))  # number of query heads, of key and value heads, head size
CASES = ((0, 512), (0, 2048), (2048, 512))  # positions before, queries
UNIT_TURNS = 40_000
FMA, DOT = "float32 FMA", "bfloat16 dot"


def operations(before: int, count: int, heads: tuple[int, int, int]) -> int:
    """Return the number of operations; a multiply-add is two."""
    return 4 * heads[0] * heads[2] * sum(range(before + 1, before + count + 1))


def unit_of(variant: str, dtype: str) -> str:
    """Return the arithmetic unit of that variant."""
    return DOT if dtype != "float32" and DOT in _cpu.units(variant) else FMA


def rates(variant: str, dtype: str, case: tuple[int, int], heads: tuple[int, int, int], rounds: int) -> tuple[float, float]:
    """Return the operations per second of attention and of its unit."""
    assert _cpu.select(variant), f"{variant} is not of this machine"
    run, unit, best, peak = attention(dtype, *case, heads), unit_of(variant, dtype), 0.0, 0.0
    run()
    for _ in range(rounds):
        begin_s = time.thread_time()
        run()
        middle_s = time.thread_time()
        num_operations = _cpu.run_unit(variant, unit, UNIT_TURNS)
        best = max(best, operations(*case, heads) / (middle_s - begin_s))
        peak = max(peak, num_operations / (time.thread_time() - middle_s))
    return best, peak


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.attention", description=__doc__.partition(":")[0])
    variants = _cpu.candidates()
    parser.add_argument("--variant", choices=variants, nargs="+", default=variants)
    parser.add_argument("--dtype", choices=KV_TYPES, nargs="+", default=["bfloat16"], help="of keys and values")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    _cpu.set_num_threads(1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("variant", "keys", "unit", "heads", *(f"{count} behind {before}" for before, count in CASES)):
        table.add_column(column, no_wrap=True)
    for variant in options.variant:
        for dtype in options.dtype:
            for heads in HEADS:
                found = [rates(variant, dtype, case, heads, options.rounds) for case in CASES]
                cells = [f"{best / 1e9:.0f} GFLOP/s, {share(best / peak)}" for best, peak in found]
                table.add_row(variant, dtype, unit_of(variant, dtype), "{} of {}, {}".format(*heads), *cells)
    Console(highlight=False, width=132).print(table)


if __name__ == "__main__":
    main()
