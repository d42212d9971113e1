"""Extras of media rows: features instead of embeddings or added to hidden states, experts of their own, and angles of three
positions.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from engine.checkpoint.rope_config import RopeConfig
from ops.modules import AttentionShape, Experts, Linear, Rotary, Router, RoutingRule
from ops.table import OpTable
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from workers.weights.rotary import rotary_angles, rotary_tables

WIDTH, ROWS = 40, 48


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def step_of(k: OpTable, feature_rows: np.ndarray, features: np.ndarray | None = None) -> HandMadeStep:
    """Return a step of one sequence with these features; rows with features use the second set of experts."""
    step = HandMadeStep([(3, 0, len(feature_rows))], row_tile=k.row_tile)
    step.inputs.features = step.inputs.kept.features = features
    for inputs in (step.inputs, step.inputs.kept):
        inputs.set("feature_rows", feature_rows, -1)
        inputs.set("expert_sets", feature_rows >= 0)
    return step


def some_rows() -> np.ndarray:
    rows = np.full(ROWS, -1, np.int32)
    rows[5:17], rows[30], rows[47] = np.arange(7, 19), 0, 63
    return rows


@pytest.mark.parametrize("is_narrow", [False, True])
def test_features_replace_or_are_added(k: OpTable, is_narrow: bool) -> None:
    """Each has columns of its own; rows without any stay the same to the bit."""
    features = random(64, 3 * WIDTH, seed=1)
    kept = (features.view(np.uint32) >> 16).astype(np.uint16) if is_narrow else features
    if is_narrow:
        features = (kept.astype(np.uint32) << 16).view(np.float32)
    rows = some_rows()
    step = step_of(k, rows, kept)
    cache = step.cache(k, 1, 8)
    begun, x = k.begin(step.inputs, cache), random(ROWS, WIDTH, seed=2)
    has = rows >= 0
    for number in range(3):
        expected = x.copy()
        part = features[rows[has], number * WIDTH : (number + 1) * WIDTH]
        expected[has] = x[has] + part if number else part
        np.testing.assert_array_equal(k.take_features(begun, paddle.to_tensor(x.copy()), number).numpy(), expected)


def test_no_row_has_features(k: OpTable) -> None:
    step = step_of(k, np.full(ROWS, -1, np.int32), np.full((64, WIDTH), np.nan, np.float32))
    x = random(ROWS, WIDTH)
    found = k.take_features(k.begin(step.inputs, step.cache(k, 1, 8)), paddle.to_tensor(x.copy()), 0)
    np.testing.assert_array_equal(found.numpy(), x)


@pytest.mark.parametrize("row", [64, -2])
def test_a_row_that_is_not_there(row: int) -> None:
    from ops.cpu import table as native

    rows = np.full(ROWS, -1, np.int32)
    rows[3] = row
    step = step_of(native.TABLE, rows, random(64, WIDTH))
    with pytest.raises(IndexError, match=f"row {row} of 64 features"):
        native.TABLE.take_features(step.inputs, random(ROWS, WIDTH), 0)


def mixture(k: OpTable, set: int | None, seed: int, inner: int) -> tuple[Router, Experts]:
    router = Router(Linear((f"gate{seed}",), WIDTH, (6,)), RoutingRule(2, is_normalized=True), set=set)
    pack(k, router, weight=random(6, WIDTH, seed=seed))
    linears = [
        (Linear((f"{seed}.{e}.g", f"{seed}.{e}.u"), WIDTH, (inner, inner)), Linear((f"{seed}.{e}.d",), inner, (WIDTH,)))
        for e in range(6)
    ]
    experts = Experts(f"experts{seed}", tuple(first for first, _ in linears), tuple(second for _, second in linears))
    weights = {f"gate_up.{e}": random(2 * inner, WIDTH, seed=100 * seed + e) for e in range(6)}
    weights |= {f"down.{e}": random(WIDTH, inner, seed=100 * seed + 50 + e) for e in range(6)}
    pack(k, experts, **weights)
    return router, experts


def test_each_set_of_experts_has_its_own_rows(k: OpTable) -> None:
    """A row has the bits of the mixture with all rows in its set; a set without rows changes nothing."""
    rows, x, shared = some_rows(), random(ROWS, WIDTH, seed=3), random(ROWS, WIDTH, seed=4)
    step = step_of(k, rows)
    begun = k.begin(step.inputs, step.cache(k, 1, 8))
    both = [mixture(k, number, seed=5 + number, inner=16 + 8 * number) for number in range(2)]
    h = paddle.to_tensor(x)
    y = paddle.to_tensor(shared)
    for router, experts in both:
        y = k.experts(h, k.route(begun, h, router), experts, "silu", y)
    alone = [
        k.experts(h, k.route(begun, h, replace(router, set=None)), experts, "silu", paddle.to_tensor(shared)).numpy().copy()
        for router, experts in both
    ]
    np.testing.assert_array_equal(y.numpy(), np.where((rows >= 0)[:, None], alone[1], alone[0]))
    text = step_of(k, np.full(ROWS, -1, np.int32))
    begun = k.begin(text.inputs, text.cache(k, 1, 8))
    router, experts = both[1]
    found = k.experts(h, k.route(begun, h, router), experts, "silu", paddle.to_tensor(shared))
    np.testing.assert_array_equal(found.numpy(), shared)


LAYOUTS = {
    "sections": ((3, 3, 2), False),
    "halves of neighbours": ((3, 3, 2), True),
    "interleaved": ((4, 2, 2), False),
    "ernie": ((3, 3, 2), True),
}


def rope_of(name: str) -> RopeConfig:
    sections, is_interleaved = LAYOUTS[name]
    layout = name if name in ("interleaved", "ernie") else "sections"
    return RopeConfig("default", 1e4, 16, is_interleaved, 320, mrope_layout=layout, mrope_sections=sections)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_positions_equal_plain_rotation(name: str) -> None:
    """Any number of rows; each pair rotates by its own axis."""
    rope = rope_of(name)
    plain = replace(rope, mrope_layout="", mrope_sections=())
    cosines, sines, _ = rotary_tables(plain, 16, 100_000)
    axes = np.array(rope.pair_axes())
    for count in (1, 3, 8, 37):
        places = np.random.default_rng(count).integers(0, 100_000, (3, count))
        for found, table in zip(rotary_angles(rope, 16, places[[0, 0, 0]][axes].T), (cosines, sines), strict=True):
            np.testing.assert_array_equal(found, table[places[0]])
        axis_of = np.repeat(axes, 2) if rope.is_interleaved else np.tile(axes, 2)
        for found, table in zip(rotary_angles(rope, 16, places[axes].T), (cosines, sines), strict=True):
            expected = np.stack([table[places[axis], element] for element, axis in enumerate(axis_of)], axis=1)
            np.testing.assert_array_equal(found, expected)


def test_rows_rotate_by_their_own_angles(k: OpTable) -> None:
    """Heads with plain positions and the same angles give the same."""
    shape, plain = AttentionShape(2, 1, 16), replace(rope_of("sections"), mrope_layout="", mrope_sections=())
    rotary, by_row = Rotary(16), Rotary(16, is_by_row=True)
    tables = rotary_tables(plain, 16, 320)
    for module in (rotary, by_row):
        pack(k, module, **dict(zip(("cosines", "sines", "partners"), tables, strict=True)))
    qkv, found = random(ROWS, 64), []
    for module in (rotary, by_row):
        step = HandMadeStep([(3, 40, ROWS)], row_tile=k.row_tile)
        inputs = step.inputs
        inputs.add("row_numbers", inputs.max_rows)
        inputs.set("row_numbers", np.arange(inputs.max_rows))
        for name, table in zip(("row_cosines", "row_sines"), tables[:2], strict=True):
            inputs.add(name, inputs.max_rows, 16, dtype=np.float32)
            inputs.set(name, table[40 : 40 + ROWS])
        cache = step.cache(k, 1, 16)
        begun = k.begin(inputs, cache)
        queries = k.rotate_and_store(
            inputs, paddle.to_tensor(qkv), k.rotary_angles(inputs, module), None, shape, cache.layers[0]
        )
        found.append((queries.numpy().copy(), k.attention(begun, queries, shape, cache.layers[0]).numpy().copy()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
