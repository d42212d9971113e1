"""Single rows in the types of a model on a card: their results, which are the same however the work is split."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from ops.cuda.library import RowError
from ops.cuda.operands import MEMBERS, ROWS, STRUCTURES, TYPES, bound, operands, shape_of
from ops.cuda.packing import in_units, num_parts, scales_in_units
from ops.weight_format import DOUBLED_E2M1
from tests.ops.cuda import pages
from tests.ops.tables import emulated_card
from tools.device.cases import WITHOUT_CASES, cases

NARROW = ("float16", "bfloat16")
EPSILONS = {"float32": 2**-21, "float16": 2**-10, "bfloat16": 2**-7}


def describe(array: np.ndarray) -> tuple[int, int]:
    assert array.flags.c_contiguous
    return array.ctypes.data, array.nbytes


def run(row: str, seed: int = 0, **values: Any) -> None:
    card = emulated_card()
    card.seed(seed)
    card.run(row, operands(row, describe, **values))


def narrowed(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values as the type stores them, and as they are read back."""
    kept = pages.encode(values.astype(np.float32), dtype)
    return kept, pages.decode(kept, dtype)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- linears


class LinearCase:
    """Rows of 70 inputs or more, by a matrix of random numbers or integers."""

    def __init__(self, dtype: str, weight_type: str, num_inputs: int, num_outputs: int, num_parts: int = 8) -> None:
        self.dtype, self.weight_type = dtype, weight_type
        self.group = 64 if weight_type in ("int8", "int4", "float4") else 32
        padded = -(-num_inputs // self.group) * self.group
        self.scales: np.ndarray | None = None
        if self.group == 64:
            low, high = (-127, 128) if weight_type == "int8" else (0, 16)
            integers = np.random.default_rng(1).integers(low, high, (num_outputs, padded))
            integers[:, num_inputs:] = 8 if weight_type == "int4" else 0
            scales = np.abs(random(num_outputs, padded // 64, seed=2)) / 50
            self.scales = scales_in_units(scales, weight_type)
            zero = 8 if weight_type == "int4" else 0
            numbers = DOUBLED_E2M1[integers] if weight_type == "float4" else integers - zero
            self.exact = (numbers * scales.repeat(64, axis=1).astype(np.float64))[:, :num_inputs]
            self.weights = in_units(integers.astype(np.uint8), weight_type)
        else:
            weights = np.pad(random(num_outputs, num_inputs, seed=1), ((0, 0), (0, padded - num_inputs)))
            numbers, exact = narrowed(weights, dtype)
            self.weights = in_units(numbers, weight_type)
            self.exact = exact[:, :num_inputs].astype(np.float64)
        self.sizes = {"num_inputs": num_inputs, "padded_inputs": padded, "num_outputs": num_outputs}
        self.sizes |= {"group_size": self.group, "num_parts": num_parts}
        self.bias = random(num_outputs, seed=3)

    def run(self, x: np.ndarray, seed: int = 0, is_shared: bool = False) -> np.ndarray:
        """Return y. `is_shared`: several blocks have parts of a tile."""
        arrivals = np.zeros(self.sizes["num_outputs"] // 32 + 1, np.int32) if is_shared else None
        parts = random(self.sizes["num_parts"] * 16, self.sizes["num_outputs"]) if is_shared else None
        y = np.zeros((len(x), self.sizes["num_outputs"]), x.dtype)
        run(
            "Linear",
            seed,
            type=TYPES[self.dtype],
            x=np.ascontiguousarray(x),
            y=y,
            floats=None,
            weights={
                "values": self.weights,
                "scales": self.scales,
                "offsets": None,
                "type": TYPES[self.weight_type],
                **self.sizes,
            },
            bias=self.bias,
            parts=parts,
            arrivals=arrivals,
            num_rows=len(x),
        )
        assert arrivals is None or not arrivals.any()
        return y


@pytest.mark.parametrize("num_inputs", [72, 131, 264])
@pytest.mark.parametrize(
    ("dtype", "weight_type"),
    [
        *(("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float16", "int4"), ("float32", "int4")),
        *(("bfloat16", "float4"), ("float32", "float4")),
    ],
)
def test_linear(dtype: str, weight_type: str, num_inputs: int) -> None:
    """A row's bits are those of the row alone, in tiles of 16 and of 64 rows."""
    case = LinearCase(dtype, weight_type, num_inputs, 40)
    x, values = narrowed(random(71, num_inputs, seed=4), dtype)
    whole = case.run(x)
    exact = values.astype(np.float64) @ case.exact.T + case.bias
    error = np.abs(pages.decode(whole, dtype).reshape(exact.shape) - exact).max() / np.abs(exact).max()
    assert error < EPSILONS[dtype]
    for rows in (slice(0, 1), slice(60, 67)):
        np.testing.assert_array_equal(case.run(x[rows], seed=5), whole[rows])


@pytest.mark.parametrize("weight_type", ["bfloat16", "int8", "int4", "float4"])
def test_linear_of_many_rows_and_outputs(weight_type: str) -> None:
    """Tiles for many rows, which begin at 32 of them, give the bits of tiles for few, and of blocks that share the parts."""
    rows, outputs = (130, 16 * 128) if weight_type == "bfloat16" else (66, 16 * 128)
    case = LinearCase("bfloat16", weight_type, 328, outputs - 30, num_parts=16)
    x, values = narrowed(random(rows, 328, seed=4), "bfloat16")
    whole = case.run(x)
    exact = values.astype(np.float64) @ case.exact.T + case.bias
    assert (
        np.abs(pages.decode(whole, "bfloat16").reshape(exact.shape) - exact).max() / np.abs(exact).max() < EPSILONS["bfloat16"]
    )
    for first, last in ((0, 1), (rows - 17, rows)):
        np.testing.assert_array_equal(case.run(x[first:last], seed=5), whole[first:last])
    for seed in (6, 7):
        np.testing.assert_array_equal(case.run(x[50:58], seed, is_shared=True), whole[50:58])


@pytest.mark.parametrize(("inputs", "outputs", "expected"), [(4096, 4096, 8), (4096, 1024, 32), (3072, 1024, 16), (64, 64, 8)])
def test_small_matrices_have_more_parts(inputs: int, outputs: int, expected: int) -> None:
    assert num_parts(inputs, outputs) == expected


def test_wrong_operand_size_is_an_error() -> None:
    """The declared size is checked before anything runs; otherwise the emulation reports it."""
    case = LinearCase("bfloat16", "bfloat16", 72, 40)
    x = narrowed(random(3, 72), "bfloat16")[0]
    bias, case.bias = case.bias, case.bias[:-1]
    with pytest.raises(AssertionError, match=r"Linear: bias \[weights.num_outputs\] has 39 numbers, expected 40"):
        case.run(x)
    case.bias, case.weights = bias, case.weights.reshape(-1)[:-16]
    with pytest.raises(RowError, match=r"Linear: a vector at element 7664 of a buffer of 7664"):
        case.run(x)


# ----------------------------------------------------------------------------------------------------------- attention

BLOCK, KV_HEADS, GROUP, DIM, LENGTH = 16, 2, 3, 24, 1100


class Pages:
    """One sequence of 1100 positions with its blocks in any order."""

    def __init__(self, dtype: str) -> None:
        num_blocks = -(-LENGTH // BLOCK)
        self.dtype = dtype
        self.table = (np.random.default_rng(0).permutation(num_blocks) + 1).astype(np.int32)[None]
        numbers = [random((num_blocks + 1) * BLOCK, KV_HEADS * DIM, seed=seed) for seed in (1, 2)]
        self.blocks = [pages.blocks_of(part, KV_HEADS, BLOCK, dtype) for part in numbers]
        slots = self.table[0].repeat(BLOCK)[:LENGTH] * BLOCK + np.arange(LENGTH) % BLOCK
        kept = (pages.numbers_of(part, KV_HEADS, DIM, BLOCK, dtype)[slots] for part in self.blocks)
        self.keys, self.values = (part.reshape(LENGTH, KV_HEADS, DIM).astype(np.float64) for part in kept)

    def attend(
        self,
        queries: np.ndarray,
        positions: list[int],
        dtype: str,
        tile_rows: int,
        window: int,
        has_parts: bool,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> Any:
        rows, context = len(positions), max(positions) + 1
        num_tiles, num_parts = -(-rows // tile_rows), -(-context // 512)
        places = np.arange(num_tiles * tile_rows, dtype=np.int32)
        cache = {"keys": self.blocks[0], "values": self.blocks[1], "type": TYPES[self.dtype], "block_size": BLOCK}
        output = np.zeros_like(queries)
        scratch = np.full((rows, KV_HEADS * GROUP, num_parts, DIM + 2), np.nan, np.float32)
        run(
            "Attention",
            rows,
            type=TYPES[dtype],
            queries=np.ascontiguousarray(queries),
            output=output,
            cache={
                **cache,
                "kv_heads": KV_HEADS,
                "key_dim": DIM,
                "value_dim": DIM,
                "key_bytes": self.blocks[0].shape[1],
                "value_bytes": self.blocks[1].shape[1],
            },
            block_tables=self.table,
            tile_slots=np.zeros(num_tiles, np.int32),
            tile_contexts=np.full(num_tiles, context, np.int32),
            tile_row_ids=np.where(places < rows, places, places // tile_rows * tile_rows).astype(np.int32),
            row_queries=np.arange(rows, dtype=np.int32),
            positions=np.array(positions, np.int32),
            first_keys=None,
            last_keys=None,
            parts=scratch if has_parts else None,
            sinks=sinks,
            scale=DIM**-0.5,
            softcap=softcap,
            num_rows=rows,
            num_tiles=num_tiles,
            tile_rows=tile_rows,
            num_parts=num_parts,
            blocks_per_slot=self.table.shape[1],
            heads=KV_HEADS * GROUP,
            kv_heads=KV_HEADS,
            first_kv=0,
            window=window,
            has_chunks=False,
            is_two_sided=False,
            is_latent=False,
        )
        return output

    def expected(
        self,
        queries: np.ndarray,
        positions: list[int],
        window: int,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        result = np.empty((len(positions), KV_HEADS, GROUP, DIM))
        for row, position in enumerate(positions):
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            scores = np.einsum("hgd,khd->hgk", queries[row].reshape(KV_HEADS, GROUP, DIM), self.keys[seen]) * DIM**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.reshape(KV_HEADS, GROUP, 1) - scores.max(axis=-1, keepdims=True))
            result[row] = np.einsum("hgk,khd->hgd", weights / total, self.values[seen])
        return result.reshape(len(positions), -1)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [("float32", "float32", 0), ("bfloat16", "bfloat16", 0), ("float16", "int8", 0), ("bfloat16", "float8", 600)],
)
def test_attention(dtype: str, kv_dtype: str, window: int) -> None:
    """All three parts give the same bits, whichever row computes them, and whatever else is in the tile or the step."""
    cache, positions = Pages(kv_dtype), [1099, 3, 700, 512, 511]
    queries, values = narrowed(random(5, KV_HEADS * GROUP * DIM, seed=3), dtype)
    whole = cache.attend(queries, positions, dtype, 16, window, has_parts=False)
    expected = cache.expected(values.astype(np.float64), positions, window)
    found = pages.decode(whole, dtype).reshape(expected.shape)
    assert np.abs(found - expected).max() < 4 * EPSILONS[dtype] * np.abs(expected).max()
    np.testing.assert_array_equal(cache.attend(queries, positions, dtype, 16, window, has_parts=True), whole)
    np.testing.assert_array_equal(cache.attend(queries[2:4], positions[2:4], dtype, 1, window, has_parts=True), whole[2:4])


def test_scores_are_capped() -> None:
    cache, positions, softcap = Pages("float32"), [1099, 3, 700, 512, 511], 0.5
    queries = 3 * random(5, KV_HEADS * GROUP * DIM, seed=3)
    found = cache.attend(queries, positions, "float32", 16, 0, has_parts=False, softcap=softcap)
    expected = cache.expected(queries.astype(np.float64), positions, 0, softcap)
    assert np.abs(found - expected).max() < 4 * EPSILONS["float32"] * np.abs(expected).max()
    assert np.abs(found - cache.expected(queries.astype(np.float64), positions, 0)).max() > 0.01


@pytest.mark.parametrize("window", [0, 600])
def test_sinks_take_part_in_the_softmax(window: int) -> None:
    """The same bits whether a block computes all parts or one."""
    cache, positions = Pages("float32"), [1099, 3, 700, 512, 511]
    queries, sinks = random(5, KV_HEADS * GROUP * DIM, seed=3), 6 * random(KV_HEADS * GROUP, seed=4)
    found = cache.attend(queries, positions, "float32", 16, window, has_parts=False, sinks=sinks)
    expected = cache.expected(queries.astype(np.float64), positions, window, sinks=sinks)
    assert np.abs(found - expected).max() < 4 * EPSILONS["float32"] * np.abs(expected).max()
    np.testing.assert_array_equal(cache.attend(queries, positions, "float32", 1, window, has_parts=True, sinks=sinks), found)


@pytest.mark.parametrize("norm_place", ["before", "after", "none"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 24), ("bfloat16", 64), ("float16", 20)])
def test_heads_are_normalized_and_rotated(dtype: str, dim: int, norm_place: str) -> None:
    """Queries and keys have different weights, over the head's own numbers; values are unchanged."""
    rows, heads, kv_heads, epsilon = 5, 4, 2, 1e-3
    qkv, numbers = narrowed(random(rows, (heads + 2 * kv_heads) * dim), dtype)
    norm = random(3, dim, seed=6)
    slots = np.array([17, 2, 40, 3, 19], np.int32)
    angles = np.outer(np.arange(50), np.linspace(1, 0.1, dim))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    partners = np.roll(np.arange(dim, dtype=np.int32), dim // 2)
    positions = np.array([0, 9, 49, 3, 7], np.int32)
    queries, keys, values = (np.zeros(size, np.float32) for size in (rows * heads * dim, *[3 * BLOCK * kv_heads * dim] * 2))
    out = narrowed(queries, dtype)[0].reshape(rows, -1)
    kept = [part.view(np.uint8) for part in (keys, values)]
    cache = {"keys": kept[0], "values": kept[1], "type": TYPES["float32"], "block_size": BLOCK, "kv_heads": kv_heads}
    block_bytes = 4 * BLOCK * kv_heads * dim
    run(
        "RotateAndStore",
        type=TYPES[dtype],
        qkv=qkv,
        queries=out,
        cache={**cache, "key_dim": dim, "value_dim": dim, "key_bytes": block_bytes, "value_bytes": block_bytes},
        slot_mapping=slots,
        angle_rows=positions,
        cosines=cosines,
        sines=sines,
        partners=partners,
        norm_weight=None if norm_place == "none" else norm,
        epsilon=epsilon,
        is_normalized_after=norm_place == "after",
        has_values=False,
        num_rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        first_kv=0,
    )
    each = numbers.reshape(rows, -1, dim).astype(np.float64)
    turned = each[:, : heads + kv_heads]
    weights = np.repeat(norm[:2], [heads, kv_heads], axis=0)
    if norm_place == "before":
        turned = turned / np.sqrt((turned**2).mean(axis=-1, keepdims=True) + epsilon) * weights
    turned = turned * cosines[positions][:, None] + turned[..., partners] * sines[positions][:, None]
    if norm_place == "after":
        turned = turned / np.sqrt((turned**2).mean(axis=-1, keepdims=True) + epsilon) * weights
    of_slots = [part.reshape(-1, kv_heads, dim)[slots] for part in (keys, values)]
    found = np.concatenate([pages.decode(out, dtype).reshape(rows, heads, dim), *of_slots], axis=1)
    expected = np.concatenate([turned, each[:, heads + kv_heads :]], axis=1)
    assert np.abs(found - expected).max() < 2 * EPSILONS[dtype] * np.abs(expected).max()


def test_operands_are_declared_once() -> None:
    """A missing or extra operand is detected before any call."""
    assert ctypes.sizeof(STRUCTURES["Begin"]) == 4 * 16 + 3 * 4 + 4
    with pytest.raises(AssertionError, match=r"Begin: expected the operands \['block_tables', "):
        operands("Begin", describe, block_tables=np.zeros(1, np.int32))
    rows = {"positions": np.zeros(3, np.int32), "row_slots": np.zeros(3, np.int32), "slot_mapping": np.zeros(3, np.int32)}
    given = {**rows, "num_rows": 3, "blocks_per_slot": 2, "block_size": 16}
    with pytest.raises(AssertionError, match=r"Begin: block_tables \[_, blocks_per_slot\] is missing"):
        operands("Begin", describe, block_tables=None, **given)


@pytest.mark.parametrize("can_make", [True, False])
def test_one_operand_too_many_is_refused(can_make: bool) -> None:
    """Every row refuses an operand beyond its own, also where results are left to be allocated."""

    def make(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, {"bfloat16": "uint16"}.get(dtype, dtype))

    for case in cases(is_large=False):
        left_out = {name for name, member in MEMBERS[case.row].items() if member.is_result and can_make}
        values = {name: value for name, value in case.values.items() if name not in left_out}
        bound(case.row, describe, make if can_make else None, values)
        with pytest.raises(AssertionError, match=rf"{case.row}: expected the operands \[.*\], got \[.*'one_more'"):
            bound(case.row, describe, make if can_make else None, values | {"one_more": np.zeros(1, np.int32)})
        with pytest.raises(AssertionError, match=rf"{case.row}: expected the operands \[.*\], got \[.*'one_more'"):
            operands(case.row, describe, **case.values, one_more=1)


def test_memory_of_no_whole_numbers_is_refused() -> None:
    given = {"num_rows": 3, "blocks_per_slot": 2, "block_size": 16, "block_tables": np.zeros(4, np.int32)}
    rows = {name: np.zeros(3, np.int32) for name in ("positions", "row_slots", "slot_mapping")}
    operands("Begin", describe, **given, **rows)
    with pytest.raises(AssertionError, match="13 bytes are not a multiple of 4"):
        operands("Begin", describe, **given, **(rows | {"positions": np.zeros(13, np.uint8)}))


def test_results_have_the_declared_shapes() -> None:
    """Allocated results have the shapes that numpy gives, and other operands their declared sizes, for the cases of each row,
    of decoding rows and of several rows of a sequence (drafts, prompts)."""
    seen = set()
    for case in cases(is_large=False):
        results = {name: case.values[name] for name, member in MEMBERS[case.row].items() if member.is_result}
        others = {name: value for name, value in case.values.items() if name not in results}
        filled, made = bound(
            case.row, describe, lambda shape, dtype: np.zeros(shape, {"bfloat16": "uint16"}.get(dtype, dtype)), others
        )
        assert {name: (array.size, array.itemsize) for name, array in made.items()} == {
            name: (array.size, array.itemsize) for name, array in results.items()
        }, case.text
        for member in MEMBERS[case.row].values():
            value = case.values[member.name]
            if value is None or member.dimensions is None or "_" in member.shape.split(", ")[0]:
                continue
            least = int(np.prod(shape_of(member, filled)))
            assert value.size == least or (member.name in ("sent", "slots") and value.size > least), (case.text, member.name)
        seen.add(case.row)
    assert seen == set(ROWS) - WITHOUT_CASES
