"""Linears in the processor's tiles, or in the model of them: the bits of bfloat16 equal the manual's formula."""

from __future__ import annotations

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.executors import Recording
from ops.cpu.table import TABLE as k
from ops.cpu.table import make_table
from ops.modules import GateClamp, Linear
from ops.weight_format import BFLOAT16
from tests.ops import tiles
from tests.ops.packing import pack
from tests.ops.tables import table

TILED = [variant for variant in _cpu.variants() if variant.startswith("amx")]
SHAPES = [(20, 37), (7, 1), (64, 48), (97, 70), (300, 33), (544, 16)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("variant", TILED)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_bits_of_bfloat16(variant: str, num_inputs: int, num_outputs: int) -> None:
    """Rows that fill a part of a tile, tiles of several sizes, and more than one task has."""
    weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
    module = Linear(("w",), num_inputs, (num_outputs,), True, BFLOAT16)
    x = random(200, num_inputs)
    expected = tiles.linear(x, tiles.widened(tiles.bfloat16_bits(weight)), bias)
    with table(f"{variant}-2"):
        pack(k, module, weight=weight, bias=bias)
        for rows in (1, 2, 15, 16, 17, 33, 100, 200):
            np.testing.assert_array_equal(k.linear(x[:rows], module).numpy(), expected[:rows])


@pytest.mark.parametrize("variant", TILED)
def test_denormal_and_infinite_numbers(variant: str) -> None:
    """Denormal activations and weights are 0. A row with NaN or infinity gives NaN or infinity where its formula does and does
    not affect the others, also where its inputs fill no tile; so does an output with infinite weights, in the panel after those
    lines."""
    num_inputs, num_outputs = 70, 40
    weight, x = random(num_outputs, num_inputs, seed=1), random(9, num_inputs)
    weight[3], weight[5, 2], weight[20] = 1e-39, 0, np.inf
    x[0], x[1, ::2], x[4, 3] = 1e-39, -1e-40, 3e38
    x[6, 2], x[7, 69], x[8, 0] = np.inf, np.nan, -np.inf
    module = Linear(("w",), num_inputs, (num_outputs,), False, BFLOAT16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = tiles.linear(x, tiles.widened(tiles.bfloat16_bits(weight)))
    assert (expected[0, :20] == 0).all()
    assert (expected[:6, 3] == 0).all()
    assert np.isnan(expected[6, 5])
    assert np.isinf(expected[6, :3]).all()
    with table(f"{variant}-1"):
        pack(k, module, weight=weight)
        np.testing.assert_array_equal(k.linear(x, module).numpy(), expected)


@pytest.mark.parametrize("variant", TILED)
def test_many_results_have_the_bits_of_few(variant: str) -> None:
    """Results that are written past the caches, over several blocks of inputs and several calls."""
    num_inputs, num_outputs, rows = 600, 1040, 1030
    module = Linear(("w",), num_inputs, (num_outputs,), True, BFLOAT16)
    x = random(rows, num_inputs)
    with table(f"{variant}-2"):
        pack(k, module, weight=random(num_outputs, num_inputs, seed=1), bias=random(num_outputs, seed=2))
        y = k.linear(x, module).numpy()
        for begin, end in ((0, 1), (250, 290), (990, rows)):
            np.testing.assert_array_equal(k.linear(x[begin:end], module).numpy(), y[begin:end])


@pytest.mark.parametrize("variant", TILED)
@pytest.mark.parametrize(
    ("activation", "clamp", "num_inputs", "inner", "rows"),
    [
        ("gelu_tanh", None, 70, 48, 1),
        ("silu", None, 352, 16, 33),
        ("silu", GateClamp(1.702, 7.0), 64, 80, 300),
        ("relu2", None, 33, 1040, 1030),
    ],
)
def test_activation_in_a_linear_keeps_the_bits(
    variant: str, activation: str, clamp: GateClamp | None, num_inputs: int, inner: int, rows: int
) -> None:
    """On a tape, gate and up are not written if only the activation reads them."""
    module = Linear(("gate", "up"), num_inputs, (inner, inner), True, BFLOAT16)
    x = random(rows, num_inputs) * 4
    with table(f"{variant}-2"):
        pack(k, module, weight=random(2 * inner, num_inputs, seed=1), bias=random(2 * inner, seed=2))
        expected = k.activate_and_multiply(k.linear(x, module), activation, clamp).numpy()
        for keeps in (False, True):
            recording = Recording()
            recorded = make_table(recording)
            gate_up = recorded.linear(x, module)
            y = recorded.activate_and_multiply(gate_up, activation, clamp)
            tape = recording.finish(y, *([gate_up] if keeps else []))
            gate_up.numpy()[:] = np.inf
            tape.replay()
            np.testing.assert_array_equal(y.numpy(), expected)
            assert np.isinf(gate_up.numpy()).all() == (not keeps)
            tape.replay_range(0, 1)  # ops can still run apart
            tape.replay_range(1, 2)
            np.testing.assert_array_equal(y.numpy(), expected)
