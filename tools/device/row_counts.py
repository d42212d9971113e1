"""Cases of CUDA rows with 1, 7, 16 and 128 rows: a row's result must have the same bits in all of them.

A case grows by repeating its rows, as `operands.h` declares which operands have one for each. Samples and experts, which list
rows elsewhere, are drawn again with more rows; those of before come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ops.cuda.library import Library
from ops.cuda.operands import MEMBERS
from tools.device import draft_cases, recurrent_cases
from tools.device.card import Card
from tools.device.case import Case
from tools.device.cases import expert_cases, sample_case
from tools.device.rows import Placed

COUNTS, SMALL_COUNTS = (1, 7, 16, 128), (1, 7)
_ALSO = {"Adapt": ("x", "slots_of_rows"), "Multiply": ("factors",)}  # of a row, though the header cannot say so
_SCRATCH = ("parts",)
_NEVER = 1 << 30  # period of rows that do not repeat
_OTHER = ("Sample", "ExpertLinear", "Dispatch", "Derive", *draft_cases.ROWS, *recurrent_cases.ROWS)


class Counted(NamedTuple):
    """A case with `num_rows` rows. Row r of `results` (by operand) is row r modulo `period` of every other one."""

    case: Case
    num_rows: int
    period: int
    results: tuple[str, ...]


def of_cases(cases: list[Case], is_small: bool) -> Iterator[tuple[str, list[Counted]]]:
    """Yield a name and the same case with each number of rows. Rows without a number of rows are left out; so are those of
    layers that draft and of recurrent layers, which compute each number by itself, or integers."""
    counts = SMALL_COUNTS if is_small else COUNTS
    for case in cases:
        if "num_rows" in case.values and case.row not in _OTHER and _is_one_row_a_tile(case):
            period = case.values["num_rows"]
            if case.row == "Linear" and period != 16 and any(_is_like(case, other) for other in cases):
                continue  # the same matrix
            yield f"{case.row}, {case.text}", [_grown(case, count, period) for count in counts]
    yield "Sample", [Counted(sample_case(count, 300), count, _NEVER, ("drawn",)) for count in counts]
    linears = [next(case for case in expert_cases(False, count) if case.row == "ExpertLinear") for count in counts]
    yield "ExpertLinear", [Counted(case, count, _NEVER, ("y",)) for case, count in zip(linears, counts, strict=True)]


def _is_like(case: Case, other: Case) -> bool:
    """Return whether the other case has the same matrix and sixteen rows."""
    own, its = case.text.split(" x ", 1), other.text.split(" x ", 1)
    return other.row == case.row and own[1:] == its[1:] and its[0] == "16"


def _is_one_row_a_tile(case: Case) -> bool:
    return bool(case.values.get("tile_rows", 1) == 1)


def _grown(case: Case, count: int, period: int) -> Counted:
    values: dict[str, Any] = dict(case.values)
    results = []
    for name, member in MEMBERS[case.row].items():
        array = values[name]
        is_of_rows = member.shape.startswith(("[num_rows", "[num_tiles")) or name in _ALSO.get(case.row, ())
        if array is not None and is_of_rows:
            values[name] = np.resize(array, (array.shape[0] * count // period, *array.shape[1:]))
            if array.shape[0] == period and name not in _SCRATCH:
                results.append(name)
    values["num_rows"] = count
    if case.row == "Attention":
        numbers = np.arange(count, dtype=np.int32)
        values |= {"num_tiles": count, "tile_row_ids": numbers, "row_queries": numbers}
        results = ["output"]
    return Counted(msgspec.structs.replace(case, values=values), count, period, tuple(results))


def differences(card: Card, rows: Library, counted: Iterable[Counted]) -> str:
    """Return which results differ; empty: none."""
    before: dict[str, np.ndarray] = {}  # most rows so far
    for case, count, period, names in counted:
        placed = Placed(card, case)
        try:
            rows.run(case.row, placed.operands)
            outcome = placed.outcome()
        finally:
            placed.free()
        for name in names:
            found, known = _rows_of(name, outcome[name], count), before.get(name)
            if (row := _first_unequal(found, np.resize(found[:period], found.shape))) >= 0:
                return f"{name} of {count} rows: row {row} has other bits than row {row % period}, which has the same inputs"
            if known is not None and (row := _first_unequal(found, known)) >= 0:
                return f"{name} of {count} rows: row {row} has other bits than with fewer rows"
            if known is None or len(found) > len(known):
                before[name] = found
    return ""


def _rows_of(name: str, array: np.ndarray, count: int) -> np.ndarray:
    """Return bytes by row."""
    by_row = array.T if name == "drawn" else array
    return np.ascontiguousarray(by_row).reshape(count, -1).view(np.uint8)


def _first_unequal(found: np.ndarray, expected: np.ndarray) -> int:
    """Return the first row, of those that both have, with other bytes; -1: none."""
    count = min(len(found), len(expected))
    rows = np.flatnonzero((found[:count] != expected[:count]).any(axis=1))
    return int(rows[0]) if len(rows) else -1
