"""Speed of each kernel variant on this processor: a linear of 1, 16 and 128 rows over each weight format, and attention of one
query and of a prefill tile over each type of keys and values.

`python -m ops.cpu.rates` prints it as JSON: {timed part: {variant: [seconds of each case]}}. The launcher runs it once per
processor and build (`workers/devices/kernels.py`), in a separate process, so that an illegal instruction does not end the
engine.

One thread is timed by its CPU time, so that other load is not counted. The variants of a case alternate, each after a warm-up
run, and the shortest of all rounds counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ops import _cpu
from ops.cpu.array import address_of, empty
from ops.cpu.choice import ATTENTION, KV_TYPES, LINEARS
from ops.cpu.executors import Recording
from ops.cpu.packing import pack
from ops.cpu.table import make_table
from ops.modules import Linear
from ops.weight_format import Memory, QuantizedWeight, Values, WeightFormat

ROUNDS = 4
NUM_INPUTS, NUM_OUTPUTS = 1024, 384  # float32: 1.5 MiB
LINEAR_ROWS = (1, 16, 128)
FORMATS = {
    "int4": WeightFormat("int4", 64, is_folded=True),
    "float4": WeightFormat("float4", 32),
}  # of kinds that need more than their name
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
ATTENTION_CASES = ((1023, 1), (192, 64))  # positions before, queries
BLOCK_SIZE = 16

Run = Callable[[], object]
Measured = dict[str, dict[str, list[float]]]


def measure(variants: list[str]) -> Measured:
    """Return the seconds of every case with each of `variants`; the previous selection is restored."""
    before = _cpu.variant()
    _cpu.set_num_threads(1)
    try:
        return {part: _times(list(cases), variants) for part, cases in _parts()}
    finally:
        _cpu.select(before)


def operations(part: str) -> list[int]:
    """Return the operations of each case of a timed part; a multiply-add is two."""
    if part.startswith(ATTENTION):
        seen = [sum(range(before + 1, before + count + 1)) for before, count in ATTENTION_CASES]
        return [4 * HEADS * HEAD_DIM * num_keys for num_keys in seen]
    return [2 * rows * NUM_INPUTS * NUM_OUTPUTS for rows in LINEAR_ROWS]


def _parts() -> Iterator[tuple[str, Iterator[Run]]]:
    for kind in LINEARS:
        yield kind, _linears(FORMATS.get(kind, WeightFormat(kind)))  # type: ignore[arg-type]
    for dtype in KV_TYPES:
        yield f"{ATTENTION} {dtype}", _attentions(dtype)


def _times(cases: list[Run], variants: list[str]) -> dict[str, list[float]]:
    best = {variant: [float("inf")] * len(cases) for variant in variants}
    for _ in range(ROUNDS):
        for case, run in enumerate(cases):
            for variant in variants:
                assert _cpu.select(variant), f"this processor does not support the variant {variant}"
                run()
                begin_ns = time.thread_time_ns()
                run()
                elapsed_ns = max(time.thread_time_ns() - begin_ns, 1)  # a coarse clock may not have advanced
                best[variant][case] = min(best[variant][case], elapsed_ns / 1e9)
    return best


def _linears(format: WeightFormat) -> Iterator[Run]:
    weight = np.sin(np.arange(NUM_OUTPUTS * NUM_INPUTS, dtype=np.float32)).reshape(NUM_OUTPUTS, NUM_INPUTS)
    module = Linear(("timed",), NUM_INPUTS, (NUM_OUTPUTS,), format=format)
    pack(module, {"weight": partial(_values, weight, format)}, Memory())
    for rows in LINEAR_ROWS:
        recording = Recording()
        tape = recording.finish(make_table(recording).linear(weight.reshape(-1)[: rows * NUM_INPUTS].reshape(rows, -1), module))
        yield tape.replay


def _values(weight: np.ndarray, format: WeightFormat) -> Values:
    if format.kind != "float4":
        return weight
    codes = (np.abs(weight) * 16).astype(np.uint8) % 16
    return QuantizedWeight(format, codes, np.ones((len(codes), weight.shape[1] // format.group_size), np.float32))


def _attentions(dtype: str) -> Iterator[Run]:
    for before, count in ATTENTION_CASES:
        yield attention(dtype, before, count, (HEADS, KV_HEADS, HEAD_DIM))


def attention(dtype: str, before: int, count: int, heads: tuple[int, int, int]) -> Run:
    """Return the run of `count` queries after `before` positions. `heads`: numbers of query heads and of KV heads, and their
    size."""
    num_heads, num_kv_heads, head_dim = heads
    num_blocks = -(-(before + count) // BLOCK_SIZE)
    num_floats = num_kv_heads * (head_dim + 1) * num_blocks * BLOCK_SIZE  # an int8 slot has a scale
    keys, values = empty(num_floats), empty(num_floats)
    keys.view(np.uint8)[:] = values.view(np.uint8)[:] = 0x3C  # 0.01 in any type
    table = np.arange(num_blocks, dtype=np.int32)
    slots, no_bounds = np.zeros(1, np.int32), np.zeros(1, np.int32)
    queries, y = (empty(count * num_heads * head_dim) for _ in range(2))
    queries[:] = 0.5
    offsets, starts = np.array([0, count], np.int32), np.array([before], np.int32)
    operands = (y, queries, keys, values, slots, offsets, starts, table)
    bounds = len(table), address_of(no_bounds), 0, 0
    window_and_scale = 0, False, False, 0.0, 0.0
    no_sinks = 0, 0
    bytes_of_head = {"float32": 4 * head_dim, "bfloat16": 2 * head_dim, "int8": head_dim + 4}[dtype]
    layout = KV_TYPES.index(dtype), BLOCK_SIZE, 0, BLOCK_SIZE * num_kv_heads * bytes_of_head, 0, 1
    arguments: list[Any] = [*map(address_of, operands), *bounds, *heads, *window_and_scale, *no_sinks, *layout]
    return partial(_run_with, _cpu.attention(*arguments), (operands, no_bounds))


def _run_with(op: _cpu.Op, operands: object) -> None:
    """Run an op; `operands` are kept alive, since the op has their addresses."""
    _cpu.run(op)


if __name__ == "__main__":
    json.dump(measure(sys.argv[1:]), sys.stdout)
