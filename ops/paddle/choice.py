"""Selection of fused-op candidates for a device: each is tried with a model's shapes before weights are loaded.

Called by `workers/selftest/op_choice.py`. A candidate is used if its numbers match the formula, computed here in float64, and
if a row has the same bits alone, with six others, and at any position of 128 and of 640 rows. On a rank with some columns of a
linear, the bits must equal those of the whole linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import paddle

from ops.modules import AttentionShape, KvCache, LayerCache, Linear, Module, Norm, Rotary
from ops.paddle.errors import cause_of
from ops.paddle.fused import CANDIDATES, Candidate
from ops.paddle.reference import own_columns
from ops.table import ROW_TILE, OpTable
from ops.weight_format import Memory

_NUM_ROWS = 640
_TOLERANCE = 2e-5  # relative to the largest number, in float32; TF32 products are off by 1e-3
_MAX_COMPARED = 256  # columns that are computed a second time
_MAX_LOGITS = 8192
_UNABLE = (RuntimeError, ValueError, TypeError, OSError, NotImplementedError)  # Paddle's errors for unsupported ops

RowOp = Callable[[paddle.Tensor], paddle.Tensor]


class Case(NamedTuple):
    """Op with one shape. `prepare` returns the op of a table, and the same op over all ranks together."""

    op: str
    text: str
    width: int  # of its rows
    prepare: Callable[[OpTable], tuple[RowOp, RowOp]]
    expected: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # rows in float64 -> compared columns, and their values


class Fallback(msgspec.Struct, frozen=True):
    """Candidate that was not used."""

    op: str
    candidate: str
    reason: str
    is_variant: bool = False  # numbers are correct but depend on other rows


class NoCandidateError(Exception):
    """No candidate of an op is correct on this device."""


class Choice(msgspec.Struct, frozen=True):
    ops: OpTable
    taken: dict[str, str]  # op -> candidate
    fallbacks: list[Fallback]


def choose(table: OpTable, cases: Iterable[Case], *, allows_variant: bool = False) -> Choice:
    """Return `table` with the first correct candidate of each op. NoCandidateError if there is none. With `allows_variant`, a
    candidate with bits that depend on other rows is accepted if no other is correct."""
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    taken: dict[str, str] = {}
    fallbacks: list[Fallback] = []
    for op, own in by_op.items():
        failed = []
        for candidate in CANDIDATES[op]:
            fault = _fault(candidate, table, own)
            if fault is None:
                break
            failed.append(fault)
        else:
            variant = [fault.candidate for fault in failed if fault.is_variant]
            if not (variant and allows_variant):
                raise NoCandidateError("; ".join(f"{fault.candidate}: {fault.reason}" for fault in failed))
            candidate = next(each for each in CANDIDATES[op] if each.name == variant[0])
        taken[op] = candidate.name
        table = candidate.change(table)
        fallbacks += failed
    return Choice(msgspec.structs.replace(table, name="fused"), taken, fallbacks)


def _fault(candidate: Candidate, table: OpTable, cases: Sequence[Case]) -> Fallback | None:
    for case in cases:
        try:
            reason, is_variant = _check(case, candidate.change(table))
        except _UNABLE as error:
            reason, is_variant = f"it fails: {cause_of(error)}", False
        if reason:
            return Fallback(case.op, candidate.name, f"{case.text}: {reason}", is_variant)
    return None


def _check(case: Case, table: OpTable) -> tuple[str, bool]:
    """Return the fault (empty: none), and whether it only comes from other rows."""
    rows = _random(_NUM_ROWS, case.width)
    op, of_all = case.prepare(table)
    found = of_all(paddle.to_tensor(rows)).numpy()
    columns, expected = case.expected(rows.astype(np.float64))
    error, largest = np.abs(found[:, columns] - expected).max(), np.abs(expected).max()
    if not error <= _TOLERANCE * largest:  # nor NaN
        return f"error {error:.2g}, with values up to {largest:.2g}", False
    own = op(paddle.to_tensor(rows)).numpy()
    if not np.array_equal(own, found[:, : own.shape[1]] if own.shape[1] < found.shape[1] else found):
        return "columns of a rank have different bits than the whole", True
    generator = np.random.default_rng(1)
    for count, size in ((1, ROW_TILE), (7, ROW_TILE), (1, 128), (128, 128), (7, _NUM_ROWS)):
        places, chosen = generator.permutation(size)[:count], generator.permutation(_NUM_ROWS)[:count]
        company = _random(size, case.width, seed=2)
        company[places] = rows[chosen]
        if not np.array_equal(op(paddle.to_tensor(company)).numpy()[places], own[chosen]):
            return f"rows have different bits in a batch of {size}", True
    return "", False


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    """Return pseudo-random numbers, repeated in large matrices."""
    numbers = np.random.default_rng(seed).standard_normal(min(int(np.prod(shape)), 1_000_003), np.float32)
    return np.resize(numbers, shape)


def _pack(table: OpTable, module: Module, **values: np.ndarray) -> None:
    table.pack(module, {name: partial(np.asarray, value) for name, value in values.items()}, Memory())


# -------------------------------------------------------------------------------------------------------------- the cases


def linear_case(module: Linear) -> Case:
    """Return the case of a declared linear that has no weights yet. This rank's columns come first."""
    inputs, width = module.num_inputs, module.width
    own = np.concatenate([np.arange(begin, end) for begin, end in module.columns or ((0, width),)])
    order = np.append(own, np.setdiff1d(np.arange(width), own))
    compared = np.unique(np.linspace(0, width - 1, min(width, _MAX_COMPARED)).astype(int))
    weight, bias = _random(width, inputs, seed=3), _random(width, seed=4) if module.has_bias else None
    values = {"weight": weight} | ({} if bias is None else {"bias": bias})

    def prepare(table: OpTable) -> tuple[RowOp, RowOp]:
        part, whole = copy(module), Linear(module.names, inputs, (width,), module.has_bias)
        _pack(table, part, **values)
        if not module.columns:
            return lambda x: table.linear(x, part), lambda x: table.linear(x, part)
        _pack(table, whole, **values)
        in_order = paddle.to_tensor(order.astype(np.int32))
        return (
            lambda x: own_columns(table.linear(x, part)),
            lambda x: paddle.index_select(table.linear(x, whole), in_order, axis=1),
        )

    def expected(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = order[compared]
        return compared, rows @ weight[places].T + (0 if bias is None else bias[places])

    return Case("linear", f"{inputs} inputs, {len(own)} outputs", inputs, prepare, expected)


def norm_case(module: Norm) -> Case:
    weight = _random(module.width, seed=5)

    def prepare(table: OpTable) -> tuple[RowOp, RowOp]:
        own = copy(module)
        _pack(table, own, weight=weight)

        def both(x: paddle.Tensor) -> paddle.Tensor:
            return paddle.concat([table.rms_norm(x, own), *table.add_rms_norm(x, x * 0.5, own)], axis=1)

        return both, both

    def expected(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        def normalized(x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + module.epsilon) * weight

        return np.arange(3 * module.width), np.concatenate([normalized(rows), normalized(rows * 1.5), rows * 1.5], axis=1)

    return Case("rms_norm", f"width {module.width}", module.width, prepare, expected)


def activation_case(activation: str, width: int) -> Case:
    def prepare(table: OpTable) -> tuple[RowOp, RowOp]:
        def op(x: paddle.Tensor) -> paddle.Tensor:
            return own_columns(table.activate_and_multiply(x, activation))

        return op, op

    def expected(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gate, up = np.split(rows, 2, axis=1)
        return np.arange(width), gate / (1 + np.exp(-gate)) * up

    return Case("activation", f"{activation} of width {width}", 2 * width, prepare, expected)


def draw_case(vocab_size: int) -> Case:
    """Return the case of greedy tokens with many equal logits, on a part of a large vocabulary."""
    width = min(vocab_size, _MAX_LOGITS)

    def parted(tokens: np.ndarray) -> np.ndarray:
        """Return numbers that differ by more than the tolerance."""
        return np.stack([tokens // 128, tokens % 128], axis=1)

    def prepare(table: OpTable) -> tuple[RowOp, RowOp]:
        def op(x: paddle.Tensor) -> paddle.Tensor:
            logits = (x * 2).astype("int32").astype("float32")
            inputs: Any = SimpleNamespace(is_made_on_device=False)
            drawing = table.drawing
            tokens = logits.numpy().argmax(axis=1) if drawing is None else drawing.run(inputs, logits).numpy()[0]
            return paddle.to_tensor(parted(tokens).astype(np.float32))

        return op, op

    def expected(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(2), parted((rows * 2).astype(np.int32).argmax(axis=1))

    return Case("draw", f"{width} logits", width, prepare, expected)


def rotary_case(module: Rotary, cosines: np.ndarray, sines: np.ndarray, partners: np.ndarray) -> Case:
    """Return the case of two queries, a key and a value per row; its last number is its position. `cosines`, `sines`: of at
    most `_NUM_ROWS` positions."""
    shape, dim = AttentionShape(2, 1, module.head_dim), module.head_dim
    width = 4 * dim

    def positions_of(rows: Any) -> Any:
        return (abs(rows[:, width]) * 1000).astype("int32") % len(cosines)

    def prepare(table: OpTable) -> tuple[RowOp, RowOp]:
        own = copy(module)
        _pack(table, own, cosines=cosines, sines=sines, partners=partners)

        def op(x: paddle.Tensor) -> paddle.Tensor:
            rows = x.shape[0]
            slots = paddle.arange(rows, dtype="int32")
            inputs: Any = SimpleNamespace(num_rows=rows, positions=positions_of(x), slot_mappings=(slots,))
            cache = KvCache(1, [LayerCache(paddle.zeros([rows, dim]), paddle.zeros([rows, dim]), 1)]).layers[0]
            angles = table.rotary_angles(inputs, own)
            queries = table.rotate_and_store(inputs, x[:, :width], angles, None, shape, cache)
            return paddle.concat([queries, cache.keys, cache.values], axis=1)

        return op, op

    def expected(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        heads = rows[:, :width].reshape(len(rows), 4, dim)
        # positions as float32, as the op gets them
        positions = cast(np.ndarray, positions_of(rows.astype(np.float32)))
        angles = cosines[positions][:, None], sines[positions][:, None]
        rotated = heads[:, :3] * angles[0] + heads[:, :3][..., partners] * angles[1]
        return np.arange(width), np.concatenate([rotated, heads[:, 3:]], axis=1).reshape(len(rows), width)

    return Case("rotary", f"heads of {dim}", width + 1, prepare, expected)
