"""Linears over float32 and bfloat16 weights, every instruction set: the formula within a stated error, a row's bits independent
of other rows, and weights from any source in any strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.table import TABLE as k
from ops.modules import Embedding, Linear
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import table

FORMATS = [FLOAT32, BFLOAT16]
SHAPES = [(20, 37), (7, 1), (100, 48), (1, 16), (300, 200), (64, 1031), (1031, 64), (1024, 96)]


@pytest.fixture(params=_cpu.variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with table(f"{request.param}-1"):
        yield request.param


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16, the even one of two at equal distance."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    return widened(bfloat16_bits(values))


def linear_of(weight: np.ndarray, format: WeightFormat, bias: np.ndarray | None = None) -> Linear:
    module = Linear(("w",), weight.shape[1], (len(weight),), bias is not None, format)
    pack(k, module, weight=weight, bias=bias)
    return module


def rounds_rows(variant: str, format: WeightFormat) -> bool:
    """Return whether the activations are rounded too, as an instruction multiplies pairs of bfloat16."""
    return format is BFLOAT16 and variant in ("wide", "avx512bf16", "amx", "amxemulated")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_formula(variant: str, format: WeightFormat, num_inputs: int, num_outputs: int) -> None:
    """Each of n products and sums may be off by half a unit in the last place of float32: n 2^-24 of the sum of magnitudes, at
    worst. Inputs that the variant rounds to bfloat16 first are rounded here too."""
    weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
    module = linear_of(weight, format, bias)
    exact = (rounded(weight) if format is BFLOAT16 else weight).astype(np.float64).T
    for rows in (1, 2, 3, 5, 7, 13, 20, 33, 200):
        x = random(rows, num_inputs)
        seen = (rounded(x) if rounds_rows(variant, format) else x).astype(np.float64)
        error = np.abs(k.linear(x, module).numpy() - (seen @ exact + bias))
        assert (error <= (num_inputs + 2) * 2.0**-24 * (np.abs(seen) @ np.abs(exact) + np.abs(bias))).all()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_row_alone(variant: str, format: WeightFormat, num_inputs: int, num_outputs: int) -> None:
    """Alone, in batches of 1 to 64 at any place, and with other numbers of threads."""
    module = linear_of(random(num_outputs, num_inputs, seed=1), format, random(num_outputs, seed=2))
    x = random(400, num_inputs)
    whole = k.linear(x, module).numpy()
    generator = np.random.default_rng(3)
    for rows in range(1, 65):
        chosen = generator.permutation(len(x))[:rows]
        np.testing.assert_array_equal(k.linear(x[chosen], module).numpy(), whole[chosen])
    for threads in (2, 3):
        with table(f"{variant}-{threads}"):
            for rows in (1, 4, 17, 64, 400):
                np.testing.assert_array_equal(k.linear(x[:rows], module).numpy(), whole[:rows])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(20, 37), (7, 1), (100, 48), (1024, 96)])
def test_sources(variant: str, format: WeightFormat, num_inputs: int, num_outputs: int) -> None:
    """Float32 with bfloat16 values, its bits, and both transposed, reversed and with gaps give the same packed weight."""
    bits = bfloat16_bits(random(num_outputs, num_inputs, seed=1))
    expected = linear_of(widened(bits), format)
    for source in (bits, widened(bits)):
        gaps = np.zeros((num_outputs * 2, num_inputs * 3), source.dtype)
        gaps[::2, 1::3] = source
        for weight in (source, np.ascontiguousarray(source.T).T, source[::-1].copy()[::-1], gaps[::2, 1::3]):
            module = linear_of(weight, format)
            np.testing.assert_array_equal(module.weight.values.numpy(), expected.weight.values.numpy())


def test_rounding() -> None:
    """Values round to the nearest, the even one of two at equal distance; infinities stay, too large values become infinite,
    NaN stays NaN."""
    values = [
        0.0,
        -0.0,
        1.0,
        1 + 2**-8,
        1 + 2**-7,
        1 + 3 * 2**-8,
        1 + 2**-8 + 2**-20,
        -3.3e38,
        3.4028235e38,
        np.inf,
        np.nan,
        1e-40,
    ]
    weight = np.array([[*values, 0.0]], np.float32).T.copy()
    module = linear_of(weight, BFLOAT16)
    packed = module.weight.values.numpy().reshape(-1)[: 2 * len(values) : 2]
    expected = bfloat16_bits(weight[: len(values), 0])
    is_number = ~np.isnan(weight[: len(values), 0])
    np.testing.assert_array_equal(packed[is_number], expected[is_number])
    assert np.isnan(widened(packed[~is_number])).all()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
@pytest.mark.parametrize("width", [64, 37])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding(variant: str, format: WeightFormat, width: int, is_tied: bool) -> None:
    """Rows of its own, or read out of the head's panels: the same numbers."""
    table_of_rows = random(300, width, seed=1)
    module = Embedding("e", len(table_of_rows), width, format)
    if is_tied:
        module.tied = linear_of(table_of_rows, format)
    pack(k, module, weight=table_of_rows)
    expected = rounded(table_of_rows) if format is BFLOAT16 else table_of_rows
    sequences = [(2, 0, 7), (4, 3, 1), (1, 0, 200)]
    step = HandMadeStep(sequences, row_tile=1)
    step.token_ids = np.random.default_rng(5).integers(0, len(table_of_rows), step.token_ids.shape).astype(np.int32)
    step.set(sequences)
    token_ids = np.concatenate([step.token_ids[slot, start : start + count] for slot, start, count in sequences])
    np.testing.assert_array_equal(k.embedding(step.inputs, module).numpy(), expected[token_ids])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
def test_no_rows(variant: str, format: WeightFormat) -> None:
    module = linear_of(random(37, 20), format)
    assert k.linear(np.empty((0, 20), np.float32), module).shape == [0, 37]


def test_variants_for_tests_are_never_the_best() -> None:
    variants = _cpu.variants()
    assert variants[0] == "portable"
    assert variants[-1] not in ("wide", "amxemulated")
    assert _cpu.variant() == variants[-1]


def test_tiles_are_offered_only_if_listed_by_linux() -> None:
    """The kernel may refuse them nevertheless."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    runnable = {name for name, _, is_runnable in _cpu.known_variants() if is_runnable}
    assert "amx" not in runnable or {"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"} <= words
