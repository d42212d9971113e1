"""A row's bits depend on that row alone: every op gives the same bits alone, in any batch, at any place and in any chunk."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import paddle
import pytest

from ops.modules import (
    AttentionShape,
    ColumnRules,
    Factor,
    GateClamp,
    HeadNorm,
    LayerNorm,
    Limits,
    Linear,
    Norm,
    Rotary,
    Sinks,
    Standardization,
)
from ops.table import ROW_TILE, OpTable
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import CACHES
from tests.paths import REPOSITORY
from workers.weights.rotary import rotary_tables

NUM_ROWS = 96
RowOp = Callable[[paddle.Tensor], paddle.Tensor]


@lru_cache(maxsize=4)  # drawing takes longer than the ops of a test
def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linear_of(k: OpTable, num_inputs: int, num_outputs: int) -> RowOp:
    module = Linear(("w",), num_inputs, (num_outputs,), has_bias=True)
    pack(k, module, weight=random(num_outputs, num_inputs, seed=1), bias=random(num_outputs, seed=2))
    return lambda x: k.linear(x, module)


def norm_of(k: OpTable, width: int) -> RowOp:
    module = Norm("n", width, 1e-6)
    pack(k, module, weight=random(width, seed=1))
    return lambda x: k.add_rms_norm(x, x * 0.5, module)[0]


def assert_row_alone(op: RowOp, rows: np.ndarray, row_tile: int) -> None:
    """Check each row at several places of batches of several sizes, among other rows each time."""
    whole = op(paddle.to_tensor(rows)).numpy()
    assert len(whole) == NUM_ROWS
    generator = np.random.default_rng(3)
    sizes = {-(-size // row_tile) * row_tile for size in (*range(1, 9), ROW_TILE, 29, 2 * ROW_TILE, 3 * ROW_TILE, 64)}
    for size in sorted(sizes):
        for _ in range(4):
            chosen = generator.permutation(NUM_ROWS)[:size]
            np.testing.assert_array_equal(op(paddle.to_tensor(rows[chosen])).numpy(), whole[chosen])
    alone = np.zeros((ROW_TILE, rows.shape[1]), np.float32)
    for row, place in ((0, 0), (11, 5), (95, 15)):
        alone[:] = 0
        alone[place] = rows[row]
        np.testing.assert_array_equal(op(paddle.to_tensor(alone)).numpy()[place], whole[row])


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 192), (192, 320), (20, 37), (100, 48), (256, 1024), (7, 1)])
def test_linear(k: OpTable, num_inputs: int, num_outputs: int) -> None:
    assert_row_alone(linear_of(k, num_inputs, num_outputs), random(NUM_ROWS, num_inputs), k.row_tile)


@pytest.mark.parametrize("width", [64, 100, 37, 20, 256])
def test_norm(k: OpTable, width: int) -> None:
    assert_row_alone(norm_of(k, width), random(NUM_ROWS, width), k.row_tile)


@pytest.mark.parametrize("width", [64, 100, 37, 20, 256])
def test_layer_norm(k: OpTable, width: int) -> None:
    module = LayerNorm("n", width, 1e-6)
    pack(k, module, weight=random(width, seed=1), bias=random(width, seed=2))
    rows = random(NUM_ROWS, width) + 3
    assert_row_alone(lambda x: k.add_layer_norm(x, x * 0.5, module)[0], rows, k.row_tile)
    assert_row_alone(lambda x: k.layer_norm(x, module), rows, k.row_tile)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh", "sigmoid"])
@pytest.mark.parametrize("width", [64, 37])
def test_activation(k: OpTable, activation: str, width: int) -> None:
    assert_row_alone(lambda x: k.activate_and_multiply(x, activation), random(NUM_ROWS, 2 * width) * 3, k.row_tile)
    assert_row_alone(lambda x: k.activate(x, activation), random(NUM_ROWS, width) * 3, k.row_tile)


@pytest.mark.parametrize("width", [64, 37])
def test_clamped_gate(k: OpTable, width: int) -> None:
    clamp = GateClamp(1.702, 1.5)
    assert_row_alone(lambda x: k.activate_and_multiply(x, "silu", clamp), random(NUM_ROWS, 2 * width) * 3, k.row_tile)


@pytest.mark.parametrize("width", [64, 37])
def test_scale_and_add(k: OpTable, width: int) -> None:
    assert_row_alone(lambda x: k.scale_and_add(x, 0.7, x * 0.3), random(NUM_ROWS, width), k.row_tile)
    assert_row_alone(lambda x: k.scale_and_add(x, 0.7, None), random(NUM_ROWS, width), k.row_tile)


@pytest.mark.parametrize("width", [64, 37])
def test_mean_rows(k: OpTable, width: int) -> None:
    rows = random(9 * k.row_tile, width)
    counter = np.array([k.row_tile], np.int32)
    found = k.mean_rows(paddle.to_tensor(rows), 9, counter).numpy()
    np.testing.assert_allclose(found, rows.reshape(-1, 9, width).mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [(64, 16), (37, 3, 5), (20,)])
def test_adjusted_columns(k: OpTable, widths: tuple[int, ...]) -> None:
    names = tuple(map(str, range(len(widths))))
    limits, standard = Limits("l", widths, names=names), Standardization("s", widths, factor=2.5)
    bias, scale = random(limits.width, seed=1), random(limits.width, seed=2)
    pack(k, limits, rules=limits.rules([(-0.4 - index, 0.3) for index in range(len(widths))]))
    pack(k, standard, rules=standard.rules(bias, scale))
    rows = random(NUM_ROWS, limits.width)
    ends = np.cumsum([0, *widths])

    def of(module: ColumnRules) -> Callable[[paddle.Tensor], paddle.Tensor]:
        return lambda x: k.adjust_columns([x[:, a:b].contiguous() for a, b in itertools.pairwise(ends.tolist())], module)

    for module in (limits, standard):
        assert_row_alone(of(module), rows, k.row_tile)
    lows = np.repeat([-0.4 - index for index in range(len(widths))], widths).astype(np.float32)
    np.testing.assert_array_equal(of(limits)(paddle.to_tensor(rows)).numpy(), np.clip(rows, lows, np.float32(0.3)))
    np.testing.assert_allclose(of(standard)(paddle.to_tensor(rows)).numpy(), (rows * 2.5 - bias) * scale, atol=1e-5)


@pytest.mark.parametrize("width", [64, 37])
def test_multiply_by_row(k: OpTable, width: int) -> None:
    def scaled(x: paddle.Tensor) -> paddle.Tensor:
        return k.multiply(x, k.activate(x[:, :1].contiguous(), "sigmoid"))

    rows = random(NUM_ROWS, width)
    assert_row_alone(scaled, rows, k.row_tile)
    expected = rows / (1 + np.exp(-rows[:, :1]))
    np.testing.assert_allclose(scaled(paddle.to_tensor(rows)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 37])
def test_multiply_by_tensor_or_factor(k: OpTable, width: int) -> None:
    factor, rows = Factor("f"), random(NUM_ROWS, width)
    pack(k, factor, weight=np.array([-0.7], np.float32))

    def multiplied(x: paddle.Tensor) -> paddle.Tensor:
        return k.multiply(k.multiply(x, k.activate(x, "sigmoid")), factor)

    assert_row_alone(multiplied, rows, k.row_tile)
    np.testing.assert_allclose(multiplied(paddle.to_tensor(rows)).numpy(), -0.7 * rows / (1 + np.exp(-rows)), rtol=1e-5)


@pytest.mark.parametrize("is_of_heads", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 20), (2, 2, 64)])
def test_normalize_wide(k: OpTable, heads: int, kv_heads: int, head_dim: int, is_of_heads: bool) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim)
    sizes = (("q", shape.queries_width), ("k", shape.keys_width))
    norms = [Norm(name, width, 1e-6, head_dim=head_dim if is_of_heads else 0) for name, width in sizes]
    for seed, norm in enumerate(norms):
        pack(k, norm, weight=random(norm.width, seed=seed))
    rows = random(NUM_ROWS, shape.queries_width + 2 * shape.keys_width)
    assert_row_alone(lambda x: k.normalize_wide(x, *norms, shape), rows, k.row_tile)
    if is_of_heads:
        found = k.normalize_wide(paddle.to_tensor(rows), *norms, shape).numpy()[:, : shape.queries_width]
        parts = rows[:, : shape.queries_width].reshape(NUM_ROWS, heads, head_dim)
        weights = random(shape.queries_width, seed=0).reshape(heads, head_dim)
        expected = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-6) * weights
        np.testing.assert_allclose(found, expected.reshape(NUM_ROWS, -1), rtol=1e-4, atol=1e-5)


SHAPES = [
    AttentionShape(4, 2, 16),
    AttentionShape(4, 4, 20),  # multi-head
    AttentionShape(6, 1, 24),  # multi-query
    AttentionShape(1, 1, 8),
    AttentionShape(8, 2, 32, sliding_window=9),
    AttentionShape(8, 2, 32, sliding_window=100, scale=0.3),
    AttentionShape(4, 1, 32, softcap=3.0),
    AttentionShape(4, 2, 16, sliding_window=9, sinks=Sinks("sinks", 4)),
    AttentionShape(6, 1, 24, sinks=Sinks("sinks", 6)),
    AttentionShape(2, 1, 128),
    AttentionShape(2, 2, 256, sliding_window=64),
    AttentionShape(40, 2, 16),  # a row's queries are many
    AttentionShape(4, 2, 16, sliding_window=40, has_chunks=True),
]


# One thread gives the bits of any number: test_native.py holds it, and test_formulas.py runs every shape with one.
@pytest.mark.parametrize(("k", "kv_dtype"), [cache for cache in CACHES if not cache[0].endswith("-1")], indirect=["k"])
@pytest.mark.parametrize(
    ("shape", "block_size"), [*((shape, 16) for shape in SHAPES), (SHAPES[0], 8), (SHAPES[4], 32)], ids=str
)
def test_attention_and_rotation(k: OpTable, kv_dtype: str, shape: AttentionShape, block_size: int) -> None:
    """A prompt in one step, in chunks of several sizes, token by token, and with others: the same queries, keys, values and
    attention."""
    length, slot = 150, 3
    run = partial(run_attention, k, shape, block_size, kv_dtype)
    whole = run([[(slot, 0, length)]])
    chunked = run([[(slot, start, min(37, length - start))] for start in range(0, length, 37)])
    np.testing.assert_array_equal(chunked, whole)
    single = run([[(slot, 0, 120)], *([(slot, start, 1)] for start in range(120, length))])
    np.testing.assert_array_equal(single, whole)
    company = [(1, 0, 60), (7, 200, 1), (9, 3, 17)]
    mixed = run([[(slot, 0, 64), *company], [(slot, 64, length - 64), (7, 201, 1), (9, 20, 3)]])
    np.testing.assert_array_equal(mixed, whole)
    decoded = run([[(slot, 0, 140)], *([(slot, start, 1), (7, start, 1), (9, 1, 1)] for start in range(140, length))])
    np.testing.assert_array_equal(decoded, whole)


@pytest.mark.parametrize(("k", "kv_dtype"), CACHES, indirect=["k"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[6]], ids=str)
def test_kept_rows(k: OpTable, kv_dtype: str, shape: AttentionShape) -> None:
    """Attention and other results of the kept rows equal those of all rows."""
    sequences = [(3, 0, 100), (1, 70, 9), (7, 200, 1), (9, 3, 17), (4, 0, 40)]
    step = HandMadeStep(sequences, row_tile=k.row_tile)
    cache = step.cache(k, shape.num_kv_heads, shape.head_dim, kv_dtype)
    rows = sum(count for _, _, count in sequences)
    queries, others = (np.zeros((step.inputs.num_rows, width), np.float32) for width in (shape.queries_width, 20))
    queries[:rows], others[:rows] = random(rows, shape.queries_width), random(rows, 20, seed=4)
    whole = k.attention(k.begin(step.inputs, cache), paddle.to_tensor(queries), shape, cache.layers[0]).numpy()
    ends = np.cumsum([count for _, _, count in sequences])
    for kept_counts in ([1, 1, 1, 1, 1], [0, 9, 1, 0, 1], [100, 0, 0, 3, 40], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]):
        step.set(sequences, kept_counts)
        kept = step.inputs.kept
        row_ids = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, kept_counts, strict=True)])
        row_ids = row_ids.astype(np.int64)
        begun = k.begin(step.inputs, cache)
        step_of_kept, kept_queries, kept_others = k.keep_rows(begun, paddle.to_tensor(queries), paddle.to_tensor(others))
        assert kept_queries.shape[0] == kept.num_rows == kept.padded(len(row_ids))
        found = k.attention(step_of_kept, kept_queries, shape, cache.layers[0]).numpy()
        np.testing.assert_array_equal(found[: len(row_ids)], whole[row_ids])
        np.testing.assert_array_equal(kept_others.numpy()[: len(row_ids)], others[row_ids])


def run_attention(
    k: OpTable, shape: AttentionShape, block_size: int, kv_dtype: str, steps: list[list[tuple[int, int, int]]]
) -> np.ndarray:
    """Return attention of the first sequence's rows over all steps. A row's input depends on its slot and position alone."""
    step = HandMadeStep(steps[0], block_size=block_size, row_tile=k.row_tile)
    cache = step.cache(k, shape.num_kv_heads, shape.head_dim, kv_dtype)
    is_after = shape.has_chunks  # with one of the shapes heads are normalized after the rotation
    norm = HeadNorm("q", "k", shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-6, is_after_rotation=is_after)
    pack(k, norm, queries=random(shape.head_dim, seed=8), keys=random(shape.head_dim, seed=9))
    if shape.sinks is not None:
        pack(k, shape.sinks, weight=2 * random(shape.num_heads, seed=7))
    rotary = Rotary(shape.head_dim)
    tables = rotary_tables(_rope(shape.head_dim), shape.head_dim, 320)
    pack(k, rotary, **dict(zip(("cosines", "sines", "partners"), tables, strict=True)))
    inputs_of_slot = random(10, 320, shape.queries_width + 2 * shape.keys_width, seed=10)
    outputs = []
    for sequences in steps:
        step.set(sequences)
        inputs = step.inputs
        rows = [inputs_of_slot[slot, start : start + count] for slot, start, count in sequences]
        qkv = np.zeros((inputs.num_rows, inputs_of_slot.shape[-1]), np.float32)
        qkv[: inputs.num_tokens] = np.concatenate(rows)
        begun = k.begin(inputs, cache)
        angles = k.rotary_angles(inputs, rotary)
        queries = k.rotate_and_store(inputs, paddle.to_tensor(qkv), angles, norm, shape, cache.layers[0])
        outputs.append(k.attention(begun, queries, shape, cache.layers[0]).numpy()[: len(rows[0])])
    return np.concatenate(outputs)


def _rope(head_dim: int):  # type: ignore[no-untyped-def]
    from engine.checkpoint.rope_config import RopeConfig

    return RopeConfig("default", 10_000.0, head_dim, False, 320)


@pytest.mark.slow
def test_two_threads() -> None:
    """The same with two BLAS threads, in a process of their own."""
    program = (
        "from workers.devices.blas import configure_blas; configure_blas(2)\n"
        "from ops.paddle.reference import TABLE as k\n"
        "from tests.ops.test_invariance import *\n"
        "for inputs, outputs in [(64, 192), (256, 1024), (1024, 512)]:\n"
        "    assert_row_alone(linear_of(k, inputs, outputs), random(NUM_ROWS, inputs), 16)\n"
        "test_attention_and_rotation(k, 'float32', SHAPES[0], 16)\n"
        "test_attention_and_rotation(k, 'float32', SHAPES[2], 16)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
