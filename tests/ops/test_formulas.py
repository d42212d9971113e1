"""The ops of every table against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from engine.checkpoint.rope_config import RopeConfig
from ops import _cpu
from ops.modules import AttentionShape, Embedding, GateClamp, HeadNorm, KvCache, LayerNorm, Linear, Norm, Rotary, Sinks
from ops.paddle import reference
from ops.table import OpTable
from tests.ops.caches import contents, make_cache
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import CACHES
from workers.weights.rotary import rotary_tables


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("num_outputs", [(5,), (64,), (64, 64, 3), (200,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(k: OpTable, num_outputs: tuple[int, ...], has_bias: bool) -> None:
    module = Linear(tuple("abc"[: len(num_outputs)]), 20, num_outputs, has_bias)
    weight, bias = random(sum(num_outputs), 20, seed=1), random(sum(num_outputs), seed=2)
    pack(k, module, weight=weight, bias=bias if has_bias else None)
    x = random(32, 20)
    expected = x.astype(np.float64) @ weight.T + (bias if has_bias else 0)
    np.testing.assert_allclose(k.linear(paddle.to_tensor(x), module).numpy(), expected, atol=1e-5)


def test_add_rms_norm(k: OpTable) -> None:
    module = Norm("n", 24, 1e-3)
    weight = random(24, seed=1)
    pack(k, module, weight=weight)
    x, residual = random(16, 24), random(16, 24, seed=3)
    normed, total = k.add_rms_norm(paddle.to_tensor(x), paddle.to_tensor(residual), module)
    np.testing.assert_array_equal(total.numpy(), x + residual)
    exact = (x + residual).astype(np.float64)
    np.testing.assert_allclose(normed.numpy(), exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3) * weight, atol=1e-5)


@pytest.mark.parametrize("width", [24, 80, 200])
def test_layer_norm(k: OpTable, width: int) -> None:
    module = LayerNorm("n", width, 1e-3)
    weight, bias = random(width, seed=1), random(width, seed=2)
    pack(k, module, weight=weight, bias=bias)
    x, residual = random(16, width) + 5, random(16, width, seed=3)
    normed, total = k.add_layer_norm(paddle.to_tensor(x), paddle.to_tensor(residual), module)
    np.testing.assert_array_equal(total.numpy(), x + residual)
    exact = (x + residual).astype(np.float64)
    off = exact - exact.mean(-1, keepdims=True)
    expected = off / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-3) * weight + bias
    np.testing.assert_allclose(normed.numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(k.layer_norm(total, module).numpy(), normed.numpy())


def test_join_rows(k: OpTable) -> None:
    x = k.activate(paddle.to_tensor(random(64, 6)), "relu")
    joined = k.join_rows(x, 4, np.array([16], np.int32))
    np.testing.assert_array_equal(joined.numpy(), x.numpy().reshape(16, 24))


def test_embedding_and_take_rows(k: OpTable) -> None:
    step = HandMadeStep([(2, 5, 3)], row_tile=k.row_tile)
    module = Embedding("e", 50, 8)
    weight = random(50, 8)
    pack(k, module, weight=weight)
    rows = k.embedding(step.inputs, module)
    assert rows.shape == [step.inputs.num_rows, 8]
    np.testing.assert_array_equal(rows.numpy()[:3], weight[step.token_ids[2, 5:8]])
    taken = k.take_rows(rows, paddle.to_tensor(np.array([2, 0], np.int32)))
    np.testing.assert_array_equal(taken.numpy(), rows.numpy()[[2, 0]])


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(k: OpTable, activation: str) -> None:
    x = random(16, 18) * 2
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    found = k.activate_and_multiply(paddle.to_tensor(x), activation).numpy()
    np.testing.assert_allclose(found, ACTIVATIONS[activation](gate) * up, atol=1e-5)
    alone = k.activate(paddle.to_tensor(x), activation).numpy()
    np.testing.assert_allclose(alone, ACTIVATIONS[activation](x.astype(np.float64)), atol=1e-5)


def test_clamped_gate(k: OpTable) -> None:
    x = 3 * random(16, 18)
    x[0, 0], x[1, 10] = np.nan, np.nan
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    gate, up = np.where(gate > 1.5, 1.5, gate), np.where(np.isnan(up), up, np.clip(up, -1.5, 1.5))
    found = k.activate_and_multiply(paddle.to_tensor(x), "silu", GateClamp(1.702, 1.5)).numpy()
    np.testing.assert_allclose(found, (up + 1) * gate / (1 + np.exp(-1.702 * gate)), atol=1e-5)


# Allowed loss of a number in the cache: relative to itself, and to the largest of its position and head.
LOSSES = {
    "float32": (0, 0),
    "float16": (2**-11, 2**-24),
    "bfloat16": (2**-8, 0),
    "int8": (0, 0.5 / 127),
    "float8": (2**-4, 2**-10),
}


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES, indirect=["k"])
@pytest.mark.parametrize("rotary_dim", [8, 6])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("block_size", [16, 4, 1])
def test_rotation_and_store(k: OpTable, kv_dtype: str, rotary_dim: int, is_interleaved: bool, block_size: int) -> None:
    """Each pair (a, b) at position p is rotated by p * theta^(-2 i / rotary_dim); the rest stays; keys and values are at their
    slots."""
    shape = AttentionShape(2, 1, 8)
    step = HandMadeStep([(2, 5, 3), (4, 70, 1)], block_size=block_size, row_tile=k.row_tile)
    cache = step.cache(k, 1, 8, kv_dtype)
    before_keys, before_values = contents(k, cache.layers[0], 1, 8)
    relative, of_largest = LOSSES[kv_dtype]
    rotary = Rotary(8)
    tables = rotary_tables(RopeConfig("default", 100.0, rotary_dim, is_interleaved, 320), 8, 320)
    pack(k, rotary, **dict(zip(("cosines", "sines", "partners"), tables, strict=True)))
    qkv = random(step.inputs.num_rows, 32)
    k.begin(step.inputs, cache)
    queries = k.rotate_and_store(
        step.inputs, paddle.to_tensor(qkv), k.rotary_angles(step.inputs, rotary), None, shape, cache.layers[0]
    ).numpy()
    half = rotary_dim // 2
    keys, values = contents(k, cache.layers[0], 1, 8)
    places = [(2, 5), (2, 6), (2, 7), (4, 70)]
    for row, (slot, position) in enumerate(places):
        expected = qkv[row].astype(np.float64).reshape(4, 8)
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + half)
            angle = position * 100.0 ** (-2 * pair / rotary_dim)
            turned = (expected[:3, a] + 1j * expected[:3, b]) * np.exp(1j * angle)
            expected[:3, a], expected[:3, b] = turned.real, turned.imag
        np.testing.assert_allclose(queries[row].reshape(2, 8), expected[:2], atol=2e-5)
        cache_slot = step.slots_of(slot, position + 1)[-1]
        loss = of_largest * np.abs(expected).max(axis=1)
        np.testing.assert_allclose(keys[cache_slot], expected[2], rtol=relative, atol=2e-5 + loss[2])
        np.testing.assert_allclose(values[cache_slot], qkv[row, 24:], rtol=relative, atol=1.001 * loss[3])
    written = {0, *(int(step.slots_of(slot, position + 1)[-1]) for slot, position in places)}
    untouched = [slot for slot in range(len(keys)) if slot not in written]
    np.testing.assert_array_equal(keys[untouched], before_keys[untouched])
    np.testing.assert_array_equal(values[untouched], before_values[untouched])


@pytest.mark.parametrize(("k", "kv_dtype"), [*CACHES, ("cuda", "float32"), ("cuda", "int8")], indirect=["k"])
def test_layers_share_a_block(k: OpTable, kv_dtype: str) -> None:
    """A layer's head is the second of three in a block. Values are normalized, too; a layer without keys stores nothing."""
    dim, row_tile = 8, k.row_tile
    step = HandMadeStep([(2, 5, 3), (4, 70, 1)], block_size=16, row_tile=row_tile)
    wide, alone = step.cache(k, 3, dim, kv_dtype).layers[0], step.cache(k, 1, dim, kv_dtype).layers[0]
    wide.first_head, wide.num_heads = 1, 3
    shape, norm, rotary = AttentionShape(2, 1, dim), HeadNorm("q", "k", 2, 1, dim, 1e-6, has_values=True), Rotary(dim)
    pack(k, norm, queries=random(dim, seed=1), keys=random(dim, seed=2))
    tables = rotary_tables(RopeConfig("default", 100.0, dim, False, 320), dim, 320)
    pack(k, rotary, **dict(zip(("cosines", "sines", "partners"), tables, strict=True)))
    before = contents(k, wide, 3, dim)
    rows = random(step.inputs.num_rows, 4 * dim)
    begun = k.begin(step.inputs, KvCache(16, [wide]))
    angles = k.rotary_angles(step.inputs, rotary)
    queries = [
        k.rotate_and_store(step.inputs, paddle.to_tensor(rows), angles, norm, shape, cache).numpy().copy()
        for cache in (wide, alone)
    ]
    np.testing.assert_array_equal(queries[0], queries[1])
    stored = contents(k, wide, 3, dim)
    places = [int(step.slots_of(slot, position + 1)[-1]) for slot, position in ((2, 5), (2, 6), (2, 7), (4, 70))]
    values = rows[:4, 3 * dim :].astype(np.float64)
    normalized = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6)
    loss = LOSSES[kv_dtype][1] * np.abs(normalized).max() + LOSSES[kv_dtype][0] * np.abs(normalized).max()
    np.testing.assert_allclose(stored[1][places, dim : 2 * dim], normalized, atol=2e-5 + 1.001 * loss)
    for found, old, own in zip(stored, before, contents(k, alone, 1, dim), strict=True):
        np.testing.assert_array_equal(found[places, dim : 2 * dim], own[places])
        np.testing.assert_array_equal(found[:, :dim], old[:, :dim])
        np.testing.assert_array_equal(found[:, 2 * dim :], old[:, 2 * dim :])

    reader = replace(shape, has_keys=False)
    only = np.ascontiguousarray(rows[:, : 2 * dim])
    again = k.rotate_and_store(step.inputs, paddle.to_tensor(only), angles, norm, reader, wide).numpy().copy()
    np.testing.assert_array_equal(again, queries[0])
    np.testing.assert_array_equal(contents(k, wide, 3, dim), stored)
    attended = k.attention(begun, paddle.to_tensor(again), reader, wide).numpy()[:4]
    keys, values = (part[:, dim : 2 * dim].astype(np.float64) for part in stored)
    for row, (slot, position) in enumerate(((2, 5), (2, 6), (2, 7), (4, 70))):
        seen = step.slots_of(slot, position + 1)
        scores = again[row].reshape(2, dim).astype(np.float64) @ keys[seen].T / math.sqrt(dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights / weights.sum(axis=1, keepdims=True) @ values[seen]
        tolerance = {"float32": 2e-5, "bfloat16": 0.03, "int8": 0.03}[kv_dtype]
        np.testing.assert_allclose(attended[row].reshape(2, dim), expected, atol=tolerance)


@pytest.mark.parametrize("max_scores", [1 << 23, 1 << 14])
def test_attention_in_passes(max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's, where the scores are too many to hold at once."""
    monkeypatch.setattr("ops.paddle.reference.attention_ops.MAX_SCORES", max_scores)
    test_attention(reference.TABLE, "float32", 70, 8, 16, has_chunks=False)


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES, indirect=["k"])
@pytest.mark.parametrize(("window", "has_chunks"), [(0, False), (1, False), (70, False), (70, True)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (64, 16), (20, 1), (80, 64)])
def test_attention(k: OpTable, kv_dtype: str, window: int, head_dim: int, block_size: int, has_chunks: bool) -> None:
    """Softmax attention over each row's own keys, also in several passes; leftovers of other sequences in the cache, NaN
    included, do not matter, nor do blocks behind a window, which others may have got."""
    check_attention(k, kv_dtype, AttentionShape(6, 2, head_dim, window, has_chunks=has_chunks), block_size, np.full(6, -np.inf))


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES, indirect=["k"])
@pytest.mark.parametrize("window", [0, 70])
def test_attention_with_sinks(k: OpTable, kv_dtype: str, window: int) -> None:
    sinks, module = np.array([-30, -1, 0, 1, 3, 30], np.float32), Sinks("sinks", 6)
    pack(k, module, weight=sinks)
    check_attention(k, kv_dtype, AttentionShape(6, 2, 64, window, sinks=module), 16, sinks)


def check_attention(k: OpTable, kv_dtype: str, shape: AttentionShape, block_size: int, sinks: np.ndarray) -> None:
    head_dim, window, has_chunks = shape.head_dim, shape.sliding_window, shape.has_chunks
    sequences = [(2, 90, 40), (3, 0, 1), (5, 200, 2), (11, 0, 20)]
    step = HandMadeStep(sequences, block_size=block_size, row_tile=k.row_tile)
    keys, values = step.numbers(2, head_dim)
    freed = [(max(0, start - window + 1) // block_size if window else 0) * block_size for _, start, _ in sequences]
    ends = ((slot, start + count) for slot, start, count in sequences)
    used = np.concatenate([step.slots_of(*end)[first:] for end, first in zip(ends, freed, strict=True)])
    stale = np.setdiff1d(np.arange(block_size, len(keys)), used)
    keys[stale] = values[stale] = np.nan
    cache = make_cache(k, keys, values, 2, block_size, kv_dtype)
    keys, values = contents(k, cache.layers[0], 2, head_dim)
    queries = random(step.inputs.num_rows, shape.queries_width)
    found = k.attention(k.begin(step.inputs, cache), paddle.to_tensor(queries), shape, cache.layers[0]).numpy()
    queries, found = (x.astype(np.float64).reshape(-1, 6, head_dim) for x in (queries, found))
    row, expected = 0, np.zeros_like(found)
    for slot, start, count in sequences:
        for position in range(start, start + count):
            first = position // window * window if has_chunks else max(0, position - window + 1) if window else 0
            seen = step.slots_of(slot, position + 1)[first:]
            for head in range(6):
                columns = slice(head // 3 * head_dim, (head // 3 + 1) * head_dim)
                scores = keys[seen, columns].astype(np.float64) @ queries[row, head] / math.sqrt(head_dim)
                largest = max(scores.max(), sinks[head])
                weights = np.exp(scores - largest)
                expected[row, head] = weights @ values[seen, columns] / (weights.sum() + np.exp(sinks[head] - largest))
            row += 1
    np.testing.assert_allclose(found[:row], expected[:row], atol=_attention_error(kv_dtype))


def _attention_error(kv_dtype: str) -> float:
    """Return the allowed error for the contents of the cache. Instruction sets with products of bfloat16 pairs round queries
    and weights too."""
    rounds = kv_dtype != "float32" and _cpu.has_paired_products()
    return 0.03 if rounds else 1e-5
