"""The op table of CUDA's rows on an emulated card passes the common tests: some of their cases, since emulation is slow. Cases
without cache or integers are in the common tests themselves.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ops.cuda import table as cuda
from ops.cuda.array import CudaArray, HostMemory, array_on
from ops.modules import AttentionShape, LatentShape, LayerNorm, Linear, Norm
from ops.table import OpTable
from ops.weight_format import Memory, WeightFormat, float32
from tests.ops import test_formulas, test_invariance
from tests.ops import test_key_bounds as bounds
from tests.ops import test_latents as latents
from tests.ops.integers import random_weight
from tests.ops.tables import emulated_card


@pytest.fixture(scope="module")
def k() -> OpTable:
    return cuda.make_table(emulated_card())


@pytest.mark.parametrize("kv_dtype", cuda.KV_TYPES)
def test_rotation_and_store(k: OpTable, kv_dtype: str) -> None:
    test_formulas.test_rotation_and_store(k, kv_dtype, 6, True, 4)


@pytest.mark.parametrize(
    ("kv_dtype", "window", "head_dim", "block_size"),
    [("float32", 0, 20, 1), ("float16", 70, 64, 16), ("bfloat16", 0, 8, 16), ("int8", 1, 80, 64), ("float8", 70, 20, 16)],
)
def test_attention(k: OpTable, kv_dtype: str, window: int, head_dim: int, block_size: int) -> None:
    test_formulas.test_attention(k, kv_dtype, window, head_dim, block_size, has_chunks=False)


def test_attention_in_chunks_of_positions(k: OpTable) -> None:
    test_formulas.test_attention(k, "float32", 70, 20, 16, has_chunks=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kv_dtype"), [(AttentionShape(4, 2, 16), "float32"), (AttentionShape(8, 2, 32, sliding_window=100), "int8")]
)
def test_attention_in_any_chunks(k: OpTable, shape: AttentionShape, kv_dtype: str) -> None:
    test_invariance.test_attention_and_rotation(k, kv_dtype, shape, 16)
    test_invariance.test_kept_rows(k, kv_dtype, shape)


def test_latents(k: OpTable) -> None:
    latents.test_formula(k, "float32", LatentShape(3, 11, 6, 37, 0.3), 1, False)
    latents.test_row_alone(k, "int8", LatentShape(4, 16, 8, 32, 0.2), 16)


@pytest.mark.slow
def test_key_bounds(k: OpTable) -> None:
    bounds.test_same_bits_in_any_chunks(k, "float32", AttentionShape(6, 2, 20), 16)


@pytest.mark.parametrize(
    "format",
    [
        WeightFormat("int8"),
        WeightFormat("int8", 16),
        WeightFormat("int8", 64),
        WeightFormat("int4", 32),
        WeightFormat("int4", 32, has_offsets=True, scales="float16"),
        WeightFormat("int8", 32, scales="bfloat16"),
        WeightFormat("int4", 64, is_folded=True),
        WeightFormat("int4", 16, has_offsets=True),
        WeightFormat("float4", 16),
        WeightFormat("float4", 32),
    ],
    ids=str,
)
def test_integers(k: OpTable, format: WeightFormat) -> None:
    """A quantized linear gives the numbers that its weights represent, with any group and any offset."""
    outputs, inputs = 21, 192
    weight = random_weight(outputs, inputs, format)
    module = Linear(("w",), inputs, (outputs,), format=format)
    k.pack(module, {"weight": lambda: weight}, Memory())
    x = np.random.default_rng(0).standard_normal((16, inputs), np.float32)
    expected = x.astype(np.float64) @ float32(weight).T
    np.testing.assert_allclose(k.linear(paddle.to_tensor(x), module).numpy(), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("op", ["scale_and_add", "add_rms_norm", "add_layer_norm"])
def test_float32_is_added_to_bfloat16(op: str) -> None:
    """An encoder's first hidden states are float32, and what its first block adds to them is not."""
    table, memory = cuda.make_table(emulated_card(), dtype="bfloat16"), HostMemory()
    drawn = np.random.default_rng(0).standard_normal((2, 3, 64), np.float32).view(np.uint32) & 0xFFFF0000
    rows = array_on(memory, (drawn[0] >> 16).astype(np.uint16), "bfloat16")
    others = array_on(memory, drawn[1].view(np.float32)), array_on(memory, (drawn[1] >> 16).astype(np.uint16), "bfloat16")
    norm: Norm | LayerNorm = Norm("n", 64, 1e-6) if op == "add_rms_norm" else LayerNorm("n", 64, 1e-6)
    table.pack(norm, {name: lambda: np.ones(64, np.float32) for name in ("weight", "bias")}, Memory())
    found = [table.scale_and_add(rows, 2.0, x) if op == "scale_and_add" else getattr(table, op)(rows, x, norm) for x in others]
    first, second = ([each] if isinstance(each, CudaArray) else each for each in found)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
