"""A step says that it gets on while it runs: ops here read, and write, the very word that tells so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.array import ALIGNMENT, address_of
from ops.cpu.packing import WEIGHT_KINDS
from ops.cpu.progress import report_progress_to
from tests.ops.tables import table


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    """The word, [1] of uint64, as zero."""
    with table(f"{_cpu.variants()[0]}-1"):
        word = np.zeros(1, np.uint64)
        report_progress_to(word.data)
        yield word
        report_progress_to(None)


def copy(target: np.ndarray, source: np.ndarray, row_ids: np.ndarray) -> _cpu.Op:
    """The op that copies rows of `source`, words taken as pairs of floats."""
    kind = WEIGHT_KINDS.index("float32")
    return _cpu.embedding(
        address_of(target), address_of(source), 0, 0, 0, address_of(row_ids), 1, 2, 0, kind, False, 0, len(row_ids)
    )


def test_after_each_op_of_a_tape(word: np.ndarray) -> None:
    one, zero, seen = np.zeros(1, np.int32), np.zeros(1, np.uint64), np.zeros(3, np.uint64)
    ops = [copy(seen[:1], word, one), copy(seen[1:2], word, one), copy(word, zero, one), copy(seen[2:], word, one)]
    _cpu.Tape(ops).replay()
    assert seen[0] == 0
    assert 0 < seen[1] <= seen[2] <= word[0]


@pytest.mark.parametrize("row", [-1, 1])
def test_rows_that_the_table_lacks_are_not_read(word: np.ndarray, row: int) -> None:
    one = copy(np.zeros(1, np.uint64), word, np.array([row], np.int32))
    with pytest.raises(IndexError, match=f"row {row} of a table of 1 rows"):
        _cpu.run(one)
    with pytest.raises(IndexError, match=f"row {row} of a table of 1 rows"):
        _cpu.Tape([one]).replay()


def test_after_each_task_of_an_op(word: np.ndarray) -> None:
    row_ids = np.zeros(5000, np.int32)
    seen = np.full(5000, 1, np.uint64)
    _cpu.run(copy(seen, word, row_ids))
    assert seen[0] == 0
    assert 0 < seen[-1] <= word[0]


def test_a_long_product_has_several_tasks(word: np.ndarray) -> None:
    """Also on one thread. All is zero but the bias, whose end is the word: its last outputs are seen after a task."""
    rows, inputs, outputs = 8, 1024, 140_000  # few rows: their preparation is no task
    x, bias, y = (aligned_zeros(count) for count in (rows * inputs, outputs, rows * outputs))
    weight = aligned_zeros(outputs * inputs)  # never written, so it takes no memory
    report_progress_to(bias[-2:].view(np.uint64).data)
    kind = WEIGHT_KINDS.index("float32")
    to, of, by, plus = (address_of(array) for array in (y, x, weight, bias))
    _cpu.run(_cpu.linear(to, of, kind, by, 0, 0, 0, plus, inputs, outputs, 0, 0, rows))
    assert not y.reshape(rows, outputs)[:, :-2].any()
    assert y[-2:].view(np.uint64)[0] > 0


def aligned_zeros(count: int) -> np.ndarray:
    memory = np.zeros(count + ALIGNMENT // 4, np.float32)
    begin = -memory.ctypes.data % ALIGNMENT // 4
    return memory[begin : begin + count]
