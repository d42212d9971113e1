"""Rows with bounds on the keys that they see: as the formula says, with the same bits in any chunks and batches; bounds that
equal the causal ones give the bits of rows without any.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from itertools import pairwise

import msgspec
import numpy as np
import paddle
import pytest

from ops import _cpu
from ops.modules import AttentionShape, LatentShape
from ops.table import OpTable
from tests.ops.caches import contents, make_cache
from tests.ops.latents import LatentRows
from tests.ops.steps import HandMadeStep
from tests.ops.tables import CACHES

SLOT, LENGTH = 3, 150
COMPANY = [(1, 0, 60), (7, 200, 1), (9, 3, 17)]
Sequences = list[tuple[int, int, int]]


def causal(length: int = LENGTH) -> np.ndarray:
    return np.stack([np.zeros(length), np.arange(length)], axis=1).astype(np.int32)


def spans() -> np.ndarray:
    """Return bounds of two pictures that see all of themselves, [20, 52) and [70, 141), the second one nothing before token 66;
    text after it sees nothing before 5."""
    bounds = causal()
    bounds[20:52, 1], bounds[70:141, 1] = 51, 140
    bounds[70:141, 0], bounds[141:, 0] = 66, 5
    return bounds


@lru_cache(maxsize=4)  # drawing takes longer than the ops of a test
def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def attended(
    k: OpTable, kv_dtype: str, shape: AttentionShape, block_size: int, bounds: np.ndarray | None, steps: list[Sequences]
) -> np.ndarray:
    """Return attention of the first sequence's rows over all steps, with all keys in the cache from the beginning."""
    step = HandMadeStep(steps[0], block_size=block_size, row_tile=k.row_tile)
    if bounds is not None:
        step.bound(SLOT, bounds)
    cache = step.cache(k, shape.num_kv_heads, shape.head_dim, kv_dtype)
    queries_of_slot = random(10, 240, shape.queries_width, seed=10)
    outputs = []
    for sequences in steps:
        step.set(sequences)
        rows = [queries_of_slot[slot, start : start + count] for slot, start, count in sequences]
        queries = np.zeros((step.inputs.num_rows, shape.queries_width), np.float32)
        queries[: step.inputs.num_tokens] = np.concatenate(rows)
        found = k.attention(k.begin(step.inputs, cache), paddle.to_tensor(queries), shape, cache.layers[0])
        outputs.append(found.numpy()[: len(rows[0])].copy())
    return np.concatenate(outputs)


SHAPES = [
    AttentionShape(6, 2, 20),
    AttentionShape(8, 1, 64),
    AttentionShape(8, 2, 32, sliding_window=40),
    AttentionShape(6, 2, 20, sliding_window=30, is_two_sided=True),
]
# One thread gives the bits of any number: test_native.py holds it.
CACHES_OF_TWO = [cache for cache in CACHES if not cache[0].endswith("-1")]


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES_OF_TWO, indirect=["k"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula(k: OpTable, kv_dtype: str, shape: AttentionShape) -> None:
    """Keys that no row sees may be NaN."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    step = HandMadeStep([(SLOT, 0, LENGTH), (1, 0, 20)], row_tile=k.row_tile)
    step.bound(SLOT, spans())
    step.set([(SLOT, 0, LENGTH), (1, 0, 20)])
    keys, values = step.numbers(shape.num_kv_heads, dim)
    slots = step.slots_of(SLOT, LENGTH)
    stale = np.setdiff1d(np.arange(16, len(keys)), np.concatenate([slots, step.slots_of(1, 20)]))
    keys[stale] = values[stale] = np.nan
    cache = make_cache(k, keys, values, shape.num_kv_heads, 16, kv_dtype)
    keys, values = contents(k, cache.layers[0], shape.num_kv_heads, dim)
    queries = random(step.inputs.num_rows, shape.queries_width)
    found = k.attention(k.begin(step.inputs, cache), paddle.to_tensor(queries), shape, cache.layers[0]).numpy()
    queries, found = (x.astype(np.float64).reshape(-1, shape.num_heads, dim) for x in (queries, found))
    rounds = kv_dtype != "float32" and _cpu.has_paired_products()
    for position, (first, last) in enumerate(spans().tolist()):
        if shape.sliding_window:
            first = max(first, position - shape.sliding_window + 1)
        if shape.is_two_sided:
            last = min(last, position + shape.sliding_window - 1)
        for head in range(shape.num_heads):
            columns = slice(head // group * dim, (head // group + 1) * dim)
            scores = keys[slots[first : last + 1], columns].astype(np.float64) @ queries[position, head] / math.sqrt(dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ values[slots[first : last + 1], columns] / weights.sum()
            np.testing.assert_allclose(found[position, head], expected, atol=0.03 if rounds else 1e-5)


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES_OF_TWO, indirect=["k"])
@pytest.mark.parametrize(("shape", "block_size"), [(SHAPES[0], 8), (SHAPES[1], 16), (SHAPES[2], 16), (SHAPES[3], 16)], ids=str)
def test_same_bits_in_any_chunks(k: OpTable, kv_dtype: str, shape: AttentionShape, block_size: int) -> None:
    run = partial(attended, k, kv_dtype, shape, block_size)
    whole = run(spans(), [[(SLOT, 0, LENGTH)]])
    assert (whole != run(None, [[(SLOT, 0, LENGTH)]])).any()
    cuts = [0, 7, 20, 52, 53, 70, 141, 142, 149, LENGTH]
    chunks = [(SLOT, begin, end - begin) for begin, end in pairwise(cuts)]
    np.testing.assert_array_equal(run(spans(), [[chunk] for chunk in chunks]), whole)
    np.testing.assert_array_equal(run(spans(), [[chunk, *COMPANY] for chunk in chunks]), whole)
    decoded = [[(SLOT, 0, 141)], *([(SLOT, position, 1), (7, 200, 1)] for position in range(141, LENGTH))]
    np.testing.assert_array_equal(run(spans(), decoded), whole)


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES_OF_TWO, indirect=["k"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_causal_bounds_change_no_bit(k: OpTable, kv_dtype: str, shape: AttentionShape) -> None:
    """Nor do those of other sequences: rows after a prompt with bounds are like any."""
    run = partial(attended, k, kv_dtype, shape, 16)
    steps = [[(SLOT, 0, 120), *COMPANY], [(SLOT, 120, 29), (7, 201, 1)], [(SLOT, 149, 1)]]
    plain = run(None, steps)
    np.testing.assert_array_equal(run(causal(), steps), plain)
    np.testing.assert_array_equal(run(causal(20), steps), plain)


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES_OF_TWO, indirect=["k"])
def test_causal_layers_ignore_bounds(k: OpTable, kv_dtype: str) -> None:
    run = partial(attended, k, kv_dtype, msgspec.structs.replace(SHAPES[0], has_bounds=False), 16)
    steps = [[(SLOT, 0, 141), *COMPANY], [(SLOT, 141, 8), (7, 201, 1)], [(SLOT, 149, 1)]]
    np.testing.assert_array_equal(run(spans(), steps), run(None, steps))


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES_OF_TWO, indirect=["k"])
def test_latents(k: OpTable, kv_dtype: str) -> None:
    """Attention over latents has the same bits in any chunks; causal bounds change none."""
    rows = LatentRows(k, LatentShape(4, 16, 8, 40, 0.2), kv_dtype=kv_dtype)
    whole = [[(SLOT, 0, LENGTH)]]
    plain = rows.run(whole)
    rows.bounds = {SLOT: causal()}
    np.testing.assert_array_equal(rows.run(whole), plain)
    rows.bounds = {SLOT: spans()}
    bounded = rows.run(whole)
    np.testing.assert_array_equal(bounded[:20], plain[:20])
    assert (bounded[20:51] != plain[20:51]).any(axis=1).all()
    np.testing.assert_array_equal(bounded[51:66], plain[51:66])
    cuts = [0, 7, 52, 70, 141, 149, LENGTH]
    chunks = [[(SLOT, begin, end - begin), *COMPANY] for begin, end in pairwise(cuts)]
    np.testing.assert_array_equal(rows.run(chunks), bounded)
