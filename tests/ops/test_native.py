"""Properties of the native table alone: any number of threads gives the same bits, long contexts are split for the threads,
buffers of a recording do not overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops import _cpu
from ops.cpu.array import Array
from ops.cpu.executors import Immediate, place
from ops.cpu.table import TABLE as k
from ops.modules import AttentionShape, Linear
from tests.ops.caches import DTYPES, make_cache
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import table


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(300, 200), (64, 1031), (1024, 48)])
def test_linear_with_any_number_of_threads(variant: str, num_inputs: int, num_outputs: int) -> None:
    """Repeated while threads fall asleep and wake."""
    module = Linear(("w",), num_inputs, (num_outputs,))
    x = random(400, num_inputs)
    with table(f"{variant}-1"):
        pack(k, module, weight=random(num_outputs, num_inputs, seed=1))
        expected = {rows: k.linear(x[:rows], module).numpy() for rows in (1, 5, 17, 400)}
    for threads in (2, 3, 5):
        with table(f"{variant}-{threads}"):
            for turn in range(60):
                rows = (1, 5, 17, 17, 400)[turn % 5]
                np.testing.assert_array_equal(k.linear(x[:rows], module).numpy(), expected[rows])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("shape", [AttentionShape(6, 1, 24), AttentionShape(4, 1, 64, 200), AttentionShape(4, 4, 32)], ids=str)
def test_long_contexts_with_any_threads(variant: str, kv_dtype: str, shape: AttentionShape) -> None:
    """A few long contexts: their splits are tasks where threads would idle otherwise."""
    results = []
    for threads in (1, 2, 8):
        with table(f"{variant}-{threads}"):
            for sequences in ([(3, 300, 1)], [(3, 300, 1), (4, 319, 1), (5, 7, 1)]):
                step = HandMadeStep(sequences, row_tile=1)
                cache = step.cache(k, shape.num_kv_heads, shape.head_dim, kv_dtype)
                queries = random(3, shape.queries_width)[: len(sequences)]
                results.append(k.attention(k.begin(step.inputs, cache), queries, shape, cache.layers[0]).numpy())
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result, results[index % 2])
        np.testing.assert_array_equal(result[0], results[0][0])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("shape", [AttentionShape(6, 1, 24), AttentionShape(4, 1, 64, 200)], ids=str)
def test_drafts_after_long_contexts_with_any_threads(variant: str, kv_dtype: str, shape: AttentionShape) -> None:
    """A row with its drafts, across the end of a split that the first of them do not see."""
    results = []
    for threads in (1, 2):
        with table(f"{variant}-{threads}"):
            for count, others in ((7, []), (7, [(4, 250, 3)]), (4, [])):
                step = HandMadeStep([(3, 252, count), *others], row_tile=1)
                cache = step.cache(k, shape.num_kv_heads, shape.head_dim, kv_dtype)
                queries = np.concatenate([random(7, shape.queries_width)[:count], random(3 * len(others), shape.queries_width)])
                results.append(k.attention(k.begin(step.inputs, cache), queries, shape, cache.layers[0]).numpy()[:count])
    for result in results:
        np.testing.assert_array_equal(result, results[0][: len(result)])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("group", "block_size", "window"), [(1, 16, 0), (3, 64, 0), (16, 8, 20)])
def test_values_that_no_neighbour_sees_are_kept_out(
    variant: str, kv_dtype: str, group: int, block_size: int, window: int
) -> None:
    """NaN of the same prompt reaches the rows that see it and, as a weight of zero, at most 16 queries that are multiplied with
    them; with a window it leaves again."""
    shape = AttentionShape(group, 1, 32, window)
    step = HandMadeStep([(3, 0, 150)], block_size=block_size, row_tile=1)
    keys, values = step.numbers(1, 32)
    queries = random(150, shape.queries_width)
    with table(f"{variant}-1"):
        results = []
        for _ in range(2):
            cache = make_cache(k, keys, values, 1, block_size, kv_dtype)
            results.append(k.attention(k.begin(step.inputs, cache), queries, shape, cache.layers[0]).numpy())
            values[step.slots_of(3, 150)[100]] = np.nan
    expected, found = results
    reach = -(-15 // group)
    np.testing.assert_array_equal(found[: 100 - reach], expected[: 100 - reach])
    assert np.isnan(found[100]).all()
    if window:
        np.testing.assert_array_equal(found[100 + window + reach :], expected[100 + window + reach :])


def test_transposed_weights_are_packed_as_they_lie() -> None:
    weight = random(37, 20, seed=1)
    plain, transposed = (Linear(("w",), 20, (37,)) for _ in range(2))
    pack(k, plain, weight=weight)
    pack(k, transposed, weight=np.ascontiguousarray(weight.T).T)
    np.testing.assert_array_equal(plain.weight.values.numpy(), transposed.weight.values.numpy())


def test_no_rows() -> None:
    module = Linear(("w",), 20, (37,))
    pack(k, module, weight=random(37, 20))
    rows = k.linear(np.empty((0, 20), np.float32), module)
    assert isinstance(rows, Array)
    assert rows.shape == [0, 37]


def test_memory_starts_at_a_cache_line() -> None:
    executor = Immediate()
    counts = np.array([3], np.int32)
    assert executor.allocate(executor.rows(counts, 0, 8), 5).address % 64 == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 9)), max_size=40))
def test_live_buffers_do_not_overlap(drawn: list[tuple[int, int, int]]) -> None:
    lives = [(first, first + length, size * 64) for first, length, size in sorted(drawn)]
    offsets, num_bytes = place(lives)
    spans = [(*life, offset) for life, offset in zip(lives, offsets, strict=True)]
    for index, (first, last, size, offset) in enumerate(spans):
        assert 0 <= offset <= num_bytes - size
        for other_first, other_last, other_size, other_offset in spans[:index]:
            is_apart = offset + size <= other_offset or other_offset + other_size <= offset
            assert last < other_first or other_last < first or is_apart


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0,) * 8, "rms_norm takes 9 arguments, 8 were given"),
        ((0, 0, 0, 0, 0, "x", 1, 0, 1), "argument 5 is 'x'"),
        ((0, 0, 0, 0, 0, 1.0, 1 << 63, 0, 1), f"argument 6 is {1 << 63}"),
    ],
)
def test_invalid_arguments_are_named(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        _cpu.rms_norm(*arguments)
