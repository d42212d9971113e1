"""Latent attention and the small products of each head: formulas in float64, and a row's bits independent of other rows."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ops import _cpu
from ops.modules import HeadLinear, LatentShape
from ops.table import OpTable
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat
from tests.ops.latents import EPSILON, LatentRows, contents, random
from tests.ops.packing import pack
from tests.ops.tables import CACHES, table
from tests.ops.test_formulas import LOSSES
from tests.ops.test_invariance import NUM_ROWS, assert_row_alone

SHAPES = [
    LatentShape(4, 16, 8, 32, 0.2),
    LatentShape(3, 11, 6, 37, 0.3),  # odd sizes
    LatentShape(40, 3, 16, 48, 0.1),  # a row's queries are many
    LatentShape(3, 4, 64, 512, 0.05),
]


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES, indirect=["k"])
@pytest.mark.parametrize(("shape", "block_size", "is_interleaved"), [(SHAPES[0], 16, True), (SHAPES[1], 1, False)])
def test_formula(k: OpTable, kv_dtype: str, shape: LatentShape, block_size: int, is_interleaved: bool) -> None:
    """Cached latents and softmax attention over them; leftovers of other sequences, NaN included, do not matter."""
    rows = LatentRows(k, shape, block_size, kv_dtype, is_interleaved)
    slot, length = 3, 130
    found, cache, step = rows.run_in_cache([[(slot, 0, 40)], [(slot, 40, 90), (5, 0, 30)]])
    compressed = rows.inputs["compressed"][slot, :length].astype(np.float64)
    latents, keys = np.split(compressed, [shape.latent_dim], axis=1)
    latents = latents / np.sqrt((latents**2).mean(-1, keepdims=True) + EPSILON) * rows.norm_weight
    cosines, sines, partners = rows.rotary_tables
    keys = keys * cosines[:length] + keys[:, partners] * sines[:length]
    slots = step.slots_of(slot, length)
    kept = []
    for expected, is_key in ((latents, False), (keys, True)):
        kept.append(contents(cache, expected.shape[1], is_key=is_key)[slots].astype(np.float64))
        relative, of_largest = LOSSES[kv_dtype]
        loss = relative * np.abs(expected) + of_largest * np.abs(expected).max(-1, keepdims=True)
        assert (np.abs(kept[-1] - expected) <= 1.001 * loss + 1e-5).all()
    queries = rows.inputs["queries"][slot, :length].astype(np.float64).reshape(length, shape.num_heads, -1)
    rotary = queries[:, :, shape.plain_dim :]
    rotary = rotary * cosines[:length, None] + rotary[..., partners] * sines[:length, None]
    absorbed = rows.inputs["absorbed"][slot, :length].reshape(length, shape.num_heads, -1)
    scores = np.einsum("qhd,kd->hqk", absorbed, kept[0]) + np.einsum("qhd,kd->hqk", rotary, kept[1])
    scores = scores * shape.scale + np.triu(np.full((length, length), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,kd->qhd", weights / weights.sum(-1, keepdims=True), kept[0])
    error = 0.04 if kv_dtype != "float32" and _cpu.has_paired_products() else 1e-5
    np.testing.assert_allclose(found, expected.reshape(length, -1), atol=error, rtol=error / 4)


# One thread gives the bits of any number: below.
@pytest.mark.parametrize(("k", "kv_dtype"), [cache for cache in CACHES if not cache[0].endswith("-1")], indirect=["k"])
@pytest.mark.parametrize(("shape", "block_size"), [(shape, 16) for shape in SHAPES[:3]] + [(SHAPES[3], 8)], ids=str)
def test_row_alone(k: OpTable, kv_dtype: str, shape: LatentShape, block_size: int) -> None:
    """A prompt in one step, in chunks, token by token and with others."""
    length, slot = 134, 3
    run = LatentRows(k, shape, block_size, kv_dtype).run
    whole = run([[(slot, 0, length)]])
    assert np.isfinite(whole).all()
    chunked = run([[(slot, start, min(37, length - start))] for start in range(0, length, 37)])
    np.testing.assert_array_equal(chunked, whole)
    company = [(1, 0, 60), (7, 0, 70), (9, 0, 17)]
    mixed = run([[(slot, 0, 64), *company], *([(slot, start, 1), (7, start + 6, 1)] for start in range(64, 70))])
    np.testing.assert_array_equal(mixed, whole[:70])
    single = run([[(slot, 0, 125)], *([(slot, start, 1)] for start in range(125, length))])
    np.testing.assert_array_equal(single, whole)


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_long_contexts_with_any_threads(variant: str, kv_dtype: str) -> None:
    """A few long contexts: their splits are tasks where threads would idle otherwise, or the heads are distributed."""
    results = []
    for threads in (1, 2, 8):
        with table(f"{variant}-{threads}") as k:
            run = LatentRows(k, SHAPES[2], 16, kv_dtype).run
            for company in ([], [(4, 0, 1)], [(5, 0, 7)]):
                results.append(run([[(3, 0, 230)], [(3, 230, 1), *company]])[-1])
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_drafts_after_long_contexts_with_any_threads(variant: str, kv_dtype: str) -> None:
    """A row with its drafts, across the end of a split that the first of them do not see."""
    results = []
    for threads in (1, 2):
        with table(f"{variant}-{threads}") as k:
            run = LatentRows(k, SHAPES[2], 16, kv_dtype).run
            results += [run([[(3, 0, 189)], [(3, 189, 7), *company]]) for company in ([], [(4, 0, 2)])]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("format", [FLOAT32, BFLOAT16], ids=lambda format: format.kind)
@pytest.mark.parametrize(("num_inputs", "num_outputs", "is_turned"), [(11, 37, True), (64, 24, False)])
def test_head_linear(k: OpTable, format: WeightFormat, num_inputs: int, num_outputs: int, is_turned: bool) -> None:
    """Three heads, each with its own part of the weight; numbers past a head's inputs do not count."""
    other, stride, heads = 5, num_inputs + 3, 3
    size = num_inputs if is_turned else num_outputs
    weight = random(heads * (size + other), num_outputs if is_turned else num_inputs, seed=1)
    module = HeadLinear("w", heads, size + other, range(other, size + other), weight.shape[1], is_turned, format)
    pack(k, module, weight=weight)
    rows = random(NUM_ROWS, heads * stride)
    found = k.head_linear(paddle.to_tensor(rows), module).numpy().reshape(NUM_ROWS, heads, num_outputs)
    parts = weight.astype(np.float64).reshape(heads, size + other, -1)[:, other:]
    x = rows.reshape(NUM_ROWS, heads, stride)[:, :, :num_inputs]
    expected = np.einsum("rhi,hio->rho" if is_turned else "rhi,hoi->rho", x, parts)
    error = 1e-5 if format == FLOAT32 or k.name == "reference" else 0.2
    np.testing.assert_allclose(found, expected, atol=error)
    assert_row_alone(lambda x: k.head_linear(x, module), rows, k.row_tile)
