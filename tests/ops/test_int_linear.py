"""Linears over int8 and int4 weights: exact integers, the error of quantization, and a row's independence of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from ops import _cpu
from ops.cpu.int_packing import rounded
from ops.cpu.packing import PackedWeight
from ops.modules import Embedding, Linear
from ops.table import OpTable
from ops.weight_format import DOUBLED_E2M1, QuantizedWeight, WeightFormat
from ops.weight_format import float32 as values_of
from tests.ops import integers
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import table
from tests.ops.test_invariance import NUM_ROWS, assert_row_alone

INT8 = [WeightFormat("int8", group) for group in (0, 16, 32, 64, 128, 256)]
INT4 = [WeightFormat("int4", group, offsets) for group in (16, 32, 64, 128) for offsets in (False, True)]
FOLDED = [WeightFormat("int4", group, is_folded=True) for group in _cpu.FOLDED_GROUPS]
FLOAT4 = [WeightFormat("float4", size) for size in (16, 32)]
HALVES = [WeightFormat("int8", 32, scales="float16"), WeightFormat("int4", 32, True, scales="float16")]
NARROW = [WeightFormat("int8", 32, scales="bfloat16")]
FORMATS = [*INT8, *INT4, WeightFormat("int4", 0), WeightFormat("int4", 0, True), *FOLDED, *FLOAT4, *HALVES, *NARROW]
FORMATS += [WeightFormat("float4", 32, scales="bfloat16")]
QUANTIZING = [*INT8, *FOLDED, *NARROW]
SHAPES = [(20, 37), (100, 1), (7, 16), (256, 100), (300, 70), (1024, 48)]


def named(format: WeightFormat) -> str:
    scales = "" if format.scales == "float32" else f"-{format.scales}"
    offsets, folded = "-offsets" if format.has_offsets else "", "-folded" if format.is_folded else ""
    return f"{format.kind}-{format.group_size}{offsets}{folded}{scales}"


@pytest.fixture(params=_cpu.variants())
def k(request: pytest.FixtureRequest) -> Iterator[OpTable]:
    with table(f"{request.param}-1") as found:
        yield found


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linear_of(k: OpTable, weight: np.ndarray | QuantizedWeight, format: WeightFormat, bias: np.ndarray | None = None) -> Linear:
    num_outputs, num_inputs = (weight.values if isinstance(weight, QuantizedWeight) else weight).shape
    module = Linear(("w",), num_inputs, (num_outputs,), bias is not None, format)
    pack(k, module, weight=weight, bias=bias)
    return module


def rounding(format: WeightFormat, num_inputs: int) -> float:
    """Return the float32 error that is allowed: half a unit in the last place for each block, and a few for scales and bias. An
    integer that is off by one would show: it weighs 1e-5 of a block's magnitude."""
    return (4 + -(-num_inputs // integers.block_of(format))) * 2.0**-24


@pytest.mark.parametrize("format", FORMATS, ids=named)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact(k: OpTable, format: WeightFormat, shape: tuple[int, int]) -> None:
    """Errors are within the rounding of one multiply-add per block."""
    num_inputs, num_outputs = shape
    weight = integers.random_weight(num_outputs, num_inputs, format)
    bias = random(num_outputs, seed=2)
    module = linear_of(k, weight, format, bias)
    for num_rows in (1, 2, 3, 5, 30):
        x = random(num_rows, num_inputs, seed=num_rows)
        expected, magnitude = integers.linear(x, weight, bias)
        found = k.linear(x, module).numpy()
        assert (np.abs(found - expected) <= magnitude * rounding(format, num_inputs)).all()


@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_extreme_values(k: OpTable, format: WeightFormat) -> None:
    """The largest integers of both signs everywhere, rows of zero, of tiny and of huge values; rows with NaN and infinity give
    NaN and do not affect the others."""
    num_inputs, num_outputs = 264, 20
    weight = integers.random_weight(num_outputs, num_inputs, format)
    low, high = {"int8": (-128, 127), "int4": (0, 15), "float4": (15, 7)}[format.kind]
    weight.values[0::3], weight.values[1::3] = low, high
    if weight.multipliers is not None:
        weight.multipliers[:8], weight.multipliers[8:16] = 16, -15
    x = random(12, num_inputs)
    x[0], x[1], x[2], x[3] = 1, -1, 0, 1e-38
    x[4], x[5] = 1e30, -1e30
    x[6, ::2] = 0
    x[7, 5], x[8, 200], x[9, 0] = np.nan, np.inf, -np.inf
    x[10] *= 1e-20
    finite = np.isfinite(x).all(1)
    found = k.linear(x, linear_of(k, weight, format)).numpy()
    expected, magnitude = integers.linear(x[finite], weight)
    assert (np.abs(found[finite] - expected) <= magnitude * rounding(format, num_inputs)).all()
    assert np.isnan(found[~finite]).all()


@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
def test_every_scale_of_16_bits_is_read_exactly(k: OpTable, scales: Literal["float16", "bfloat16"]) -> None:
    """Denormal halves too. The only product of each output is 127 times its scale."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = values_of(bits.view(np.float16) if scales == "float16" else bits)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 1e36) & ((np.abs(numbers) > 1e-36) | (numbers == 0))]
    format = WeightFormat("int8", 32, scales=scales)
    values = np.zeros((len(numbers), 32), np.int8)
    values[:, 0] = 1
    x = np.zeros((30, 32), np.float32)
    x[:, 0] = 127
    found = k.linear(x, linear_of(k, QuantizedWeight(format, values, numbers[:, None].copy()), format)).numpy()
    np.testing.assert_array_equal(found, np.broadcast_to(numbers * np.float32(127), found.shape))


@pytest.mark.parametrize("format", NARROW, ids=named)
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e4, 1e20])
def test_weights_of_any_size_are_rounded_alike(format: WeightFormat, size: float) -> None:
    weight = random(37, 256, seed=3) * np.float32(size)
    with table(f"{_cpu.variants()[-1]}-1"):
        error = values_of(rounded(weight, format)).astype(float) - weight
    assert np.sqrt((error**2).sum() / (weight.astype(float) ** 2).sum()) < 0.007


# Relative error (root mean square) of y against float32, for normal weights and activations: of the weights, which share a
# scale with so many others, and of the activations, about 0.6 %.
ERRORS = {
    **dict.fromkeys([*INT8, *NARROW], 0.012),
    **dict(zip(FOLDED, (0.086, 0.094, 0.102), strict=True)),
}


@pytest.mark.parametrize("format", QUANTIZING, ids=named)
@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_accuracy(k: OpTable, format: WeightFormat, is_bfloat16: bool) -> None:
    weight, x = random(200, 1024, seed=1) / 32, random(8, 1024)
    source: np.ndarray = weight
    if is_bfloat16:
        source = (weight.view(np.uint32) >> 16).astype(np.uint16)
        weight = values_of(source)
    expected = x @ weight.T
    found = k.linear(x, linear_of(k, source, format)).numpy()
    error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert ERRORS[format] / 2 < error < ERRORS[format]


@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_quantized_weights_are_laid_out_as_they_are(k: OpTable, format: WeightFormat) -> None:
    weight = integers.random_weight(37, 300, format)
    transposed = replace(weight, values=np.asfortranarray(weight.values))
    for source in (weight, transposed):
        kept = linear_of(k, source, format).weight
        np.testing.assert_array_equal(unpacked(kept, format, 37, 300), values_of(weight))


def unpacked(weight: PackedWeight, format: WeightFormat, num_outputs: int, num_inputs: int) -> np.ndarray:
    """Return the numbers that packed weights represent."""
    num_panels = -(-num_outputs // 16)
    quads = weight.values.numpy().reshape(num_panels, -1, 16, 4)
    zero = 128
    if format.kind != "int8":
        zero = 0 if format.has_offsets or format.kind == "float4" else 8
        quads = np.stack([quads & 15, quads >> 4], axis=2).reshape(num_panels, -1, 16, 4)
    values = quads.transpose(0, 2, 1, 3).reshape(num_panels * 16, -1)[:num_outputs, :num_inputs]
    values = DOUBLED_E2M1[values] if format.kind == "float4" else values.astype(np.float32) - zero
    groups = np.arange(num_inputs) // (format.group_size or num_inputs)

    def spread(grouped: np.ndarray) -> np.ndarray:
        by_output = grouped.reshape(num_panels, -1, 16).transpose(0, 2, 1).reshape(num_panels * 16, -1)
        return by_output[:num_outputs][:, groups]

    if weight.multipliers is not None:
        scales = weight.scales.numpy().reshape(-1, 1)[:num_outputs]
        return np.asarray(values * spread(weight.multipliers.numpy()) * scales)
    result: np.ndarray = values * spread(values_of(weight.scales.numpy()))
    return result if weight.offsets is None else result - spread(values_of(weight.offsets.numpy()))


@pytest.mark.parametrize("format", QUANTIZING, ids=named)
def test_every_variant_quantizes_alike(format: WeightFormat) -> None:
    """Any weights and strides; the error is as small as the format allows: half a step of int8, less than half of int4 on
    average. Zeros, an output of zeros and tiny ones stay the same."""
    weight = random(37, 300, seed=3)
    weight[3], weight[4] = 0, 1e-35
    weight[5, :200] = 0
    kept = []
    for variant in _cpu.variants():
        with table(f"{variant}-2") as k:
            plain = linear_of(k, weight, format).weight
            turned = linear_of(k, np.asfortranarray(weight), format).weight
        kept += [plain, turned]
    for other in kept[1:]:
        np.testing.assert_array_equal(other.values.numpy(), kept[0].values.numpy())
        np.testing.assert_array_equal(other.scales.numpy(), kept[0].scales.numpy())
        if format.is_folded:
            np.testing.assert_array_equal(other.multipliers.numpy(), kept[0].multipliers.numpy())
    numbers = unpacked(kept[0], format, 37, 300)
    assert (numbers[3] == 0).all()
    assert np.abs(numbers[4]).max() <= 1e-35
    assert (numbers[5, :192] == 0).all()
    error = np.sqrt(((numbers - weight) ** 2).sum() / (weight**2).sum())
    assert error < (0.011 if format.kind == "int8" else ERRORS[format])


@pytest.mark.parametrize("format", QUANTIZING, ids=named)
def test_importances_lower_the_error_of_outputs(format: WeightFormat) -> None:
    """For inputs with these mean squares, alike in every variant. Inputs that are never used cost nothing."""
    weight = random(37, 300, seed=3)
    importances = np.random.default_rng(4).lognormal(0, 2, 300).astype(np.float32)
    importances[64:192] = 0

    def error_of(found: np.ndarray) -> float:
        return float((importances * (found - weight) ** 2).sum())

    found = []
    for variant in _cpu.variants():
        with table(f"{variant}-2"):
            found.append(values_of(rounded(weight, format, importances)))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    best = error_of(values_of(rounded(weight, format)))
    assert error_of(found[0]) < (0.9 if format.group_size else 1.0) * best


@pytest.mark.parametrize("format", QUANTIZING, ids=named)
def test_other_tables_round_weights_alike(format: WeightFormat) -> None:
    weight = random(37, 300, seed=3)
    with table(f"{_cpu.variants()[-1]}-1") as k:
        kept = linear_of(k, weight, format).weight
    found = rounded(weight, format)
    assert found.format == format
    np.testing.assert_array_equal(values_of(found), unpacked(kept, format, 37, 300))


def test_weight_of_another_format_is_requantized() -> None:
    with table(f"{_cpu.variants()[-1]}-1") as k:
        weight = integers.random_weight(37, 300, WeightFormat("int4", 32, True))
        found = linear_of(k, weight, WeightFormat("int8", 64)).weight
        expected = linear_of(k, values_of(weight), WeightFormat("int8", 64)).weight
    np.testing.assert_array_equal(found.values.numpy(), expected.values.numpy())


INVARIANT = [WeightFormat("int8"), *NARROW, *INT4[2:6], *FOLDED[:2], *FLOAT4]


@pytest.mark.parametrize("format", INVARIANT, ids=named)
@pytest.mark.parametrize("shape", [(64, 192), (20, 37), (264, 100), (7, 1)], ids=str)
def test_a_row_is_the_same_in_any_company(k: OpTable, format: WeightFormat, shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    module = linear_of(k, integers.random_weight(num_outputs, num_inputs, format), format, random(num_outputs, seed=2))
    assert_row_alone(lambda x: k.linear(x, module), random(NUM_ROWS, num_inputs), k.row_tile)


@pytest.mark.parametrize("format", FORMATS, ids=named)
@pytest.mark.parametrize("shape", [(64, 192), (300, 37), (1096, 100)], ids=str)
def test_variants_with_fma_give_the_same_bits(format: WeightFormat, shape: tuple[int, int]) -> None:
    """Sums are integers, and the operations after them are the same for any number of rows."""
    num_inputs, num_outputs = shape
    weight, x = integers.random_weight(num_outputs, num_inputs, format), random(130, num_inputs)
    found = []
    for variant in _cpu.variants():
        if variant != "portable":
            with table(f"{variant}-1") as k:
                module = linear_of(k, weight, format)
                found += [[k.linear(x[:rows], module).numpy() for rows in (1, 2, 5, 7, 8, 16, 30, 130)]]
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("format", INVARIANT, ids=named)
@pytest.mark.parametrize("shape", [(300, 200), (64, 1031), (1024, 48)], ids=str)
def test_any_number_of_threads(variant: str, format: WeightFormat, shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    x = random(400, num_inputs)
    with table(f"{variant}-1") as k:
        module = linear_of(k, integers.random_weight(num_outputs, num_inputs, format), format)
        expected = {rows: k.linear(x[:rows], module).numpy() for rows in (1, 5, 17, 400)}
    for rows in (1, 5, 17):
        np.testing.assert_array_equal(expected[rows], expected[400][:rows])
    for threads in (2, 3, 5):
        with table(f"{variant}-{threads}") as k:
            for turn in range(10):
                rows = (1, 5, 17, 17, 400)[turn % 5]
                np.testing.assert_array_equal(k.linear(x[:rows], module).numpy(), expected[rows])


@pytest.mark.parametrize("format", FORMATS, ids=named)
@pytest.mark.parametrize("width", [64, 37])
def test_tied_embedding_reads_the_heads_panels(k: OpTable, format: WeightFormat, width: int) -> None:
    weight = integers.random_weight(300, width, format)
    module = Embedding("e", 300, width, format, tied=linear_of(k, weight, format))
    pack(k, module, weight=weight)
    step = HandMadeStep([(2, 0, 7), (4, 3, 1), (1, 0, 200)], row_tile=1)
    step.token_ids = np.random.default_rng(5).integers(0, 300, step.token_ids.shape).astype(np.int32)
    step.set([(2, 0, 7), (4, 3, 1), (1, 0, 200)])
    token_ids = np.concatenate([step.token_ids[2, :7], step.token_ids[4, 3:4], step.token_ids[1, :200]])
    np.testing.assert_array_equal(k.embedding(step.inputs, module).numpy(), values_of(weight)[token_ids])
