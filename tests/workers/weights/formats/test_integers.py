"""Stored integers in the formats of the kernels: exactly the numbers that the checkpoint represents."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.checkpoint.gguf.file import BLOCKS
from engine.checkpoint.stored_weights import GGUF_BYTES
from ops.cpu.int_packing import SCALE_DTYPES
from ops.weight_format import QuantizedWeight, WeightFormat, float32
from tests.workers.weights.formats.quantizers import FORMATS, write_quantized_demo
from tests.workers.weights.formats.test_blocks import random_blocks
from tests.workers.weights.formats.test_quantized import checkpoint_of
from workers.weights.formats.block_types import INTEGERS
from workers.weights.formats.integers import common_format, in_format, kept_format, side_by_side

KEPT = {
    "awq, groups of 32": "int4 32 offsets",
    "awq, groups of 128": "int4 128 offsets",
    "awq, one group": "int4 128 offsets",
    "gptq 4": "int4 64",
    "gptq 4, asymmetric": "int4 32 offsets",
    "gptq 4, version 2": "int4 128 offsets",
    "gptq 4, act-order": "groups are not in the order of the inputs",
    "gptq 8": "int8 0",
    "gptq 8, asymmetric": "int8 32 offsets",
    "gptq 2": "int4 32",
    "gptq 3": "int4 64",
    "gptq 3, asymmetric": "int4 32 offsets",
    "auto-round, awq": "int4 32 offsets",
    "llm.int8": "int8 0",
    "nvfp4": "float4 16",
    "nvfp4, modelopt": "float4 16",
    "mxfp4": "float4 32",
    "packed 4": "int4 32",
    "packed 4, asymmetric": "int4 128 offsets",
    "packed 4, act-order": "groups are not in the order of the inputs",
    "packed 8": "int8 0",
    "packed 8, asymmetric": "int8 32 offsets",
    "int8, channels": "int8 0",
    "int8, groups, asymmetric": "int8 64 offsets",
    "torchao int8": "int8 0",
    "torchao int8, groups": "int8 32 offsets",
    "torchao int4": "int4 64 offsets",
    "torchao int4, unpacked": "int4 32",
    "torchao mxfp4": "float4 32",
    "torchao nvfp4": "float4 16",
    "hqq 8": "int8 64 offsets",
    "hqq 4": "int4 64 offsets",
    "hqq 3": "int4 32 offsets",
    "hqq 2": "int4 16 offsets",
    "hqq 4, axis 0": "groups across outputs",
}
BLOCKS_OF_4_BITS = ("nf4", "nf4, nested", "fp4")  # rounded to 8 bits
NAMES = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_kept_as_stored(name: str, tmp_path: Path) -> None:
    """Values with zero points are q * scale - zero * scale, exact as the scales are short."""
    write_quantized_demo(tmp_path, FORMATS[name](), num_layers=2)
    checkpoint = checkpoint_of(tmp_path)
    for tensor in NAMES:
        kept = checkpoint.kept(tensor)
        if not isinstance(kept, WeightFormat):
            assert kept in (KEPT.get(name, "8-bit floats"), None)
            continue
        found = checkpoint.read_integers(tensor, kept)
        if name in BLOCKS_OF_4_BITS:
            assert kept == WeightFormat("int8", 64)
            np.testing.assert_allclose(float32(found), checkpoint.read(tensor), rtol=0, atol=0.51 * found.scales.max())
            continue
        if name.startswith("auto-round, gptq"):
            assert kept == (WeightFormat("int8", 64) if "down_proj" in tensor else WeightFormat("int4", 32))
            np.testing.assert_array_equal(float32(found), checkpoint.read(tensor))
            continue
        assert f"{kept.kind} {kept.group_size}{' offsets' * kept.has_offsets}" == KEPT[name]
        assert_well_formed(found, kept, checkpoint.read(tensor).shape)
        np.testing.assert_allclose(float32(found), checkpoint.read(tensor), rtol=0, atol=2e-5 * np.abs(found.scales).max())


def assert_well_formed(weight: QuantizedWeight, format: WeightFormat, shape: tuple[int, ...]) -> None:
    assert weight.format == format
    assert (weight.values.dtype, weight.values.shape) == (np.int8 if format.kind == "int8" else np.uint8, shape)
    assert weight.values.flags.c_contiguous
    grid = (shape[0], shape[1] // format.group_size if format.group_size else 1)
    assert (weight.scales.dtype, weight.scales.shape) == (np.float32, grid)
    assert (weight.offsets is not None) == format.has_offsets
    if weight.offsets is not None:
        assert (weight.offsets.dtype, weight.offsets.shape) == (np.float32, grid)
    if format.kind == "int4":
        assert weight.values.max() <= 15


@pytest.mark.parametrize("type_name", INTEGERS)
def test_blocks_keep_their_values(type_name: str) -> None:
    """The same numbers as in the blocks, bit for bit."""
    values_in_block = {name: count for name, count, _ in BLOCKS.values()}[type_name]
    num_blocks = 4 * 512 // values_in_block
    blocks = random_blocks(type_name, num_blocks)
    format, decode = INTEGERS[type_name]
    values, scales, offsets = (part if part is None else part.reshape(4, -1) for part in decode(blocks))
    weight = QuantizedWeight(format, np.ascontiguousarray(values), scales, offsets)  # type: ignore[arg-type]
    assert_well_formed(weight, format, (4, 512))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name]).reshape(4, 512)
    np.testing.assert_array_equal(float32(weight), expected)


def test_memory_is_estimated_by_the_kept_format() -> None:
    bits = {"int8": 8, "int4": 4, "float4": 4}
    held = {
        name: bits[format.kind] / 8 + SCALE_DTYPES[format.scales].itemsize * (1 + format.has_offsets) / format.group_size
        for name, (format, _) in INTEGERS.items()
    }
    assert held == GGUF_BYTES


def drawn(format: WeightFormat, seed: int, num_outputs: int = 24, num_inputs: int = 256) -> QuantizedWeight:
    generator = np.random.default_rng(seed)
    grid = (num_outputs, num_inputs // (format.group_size or num_inputs))
    low, high, dtype = (0, 16, np.uint8) if format.kind == "int4" else (-128, 128, np.int8)
    values = generator.integers(low, high, (num_outputs, num_inputs)).astype(dtype)
    scales = generator.uniform(0.01, 0.1, grid).astype(np.float16).astype(np.float32)
    offsets = scales * np.float32(3) if format.has_offsets else None
    return QuantizedWeight(format, values, scales, offsets)


ALL = [WeightFormat(kind, size, has) for kind in ("int8", "int4") for size in (0, 16, 32, 128) for has in (False, True)]  # type: ignore[arg-type]
ALL += [WeightFormat(kind, 32, has, scales="float16") for kind in ("int8", "int4") for has in (False, True)]  # type: ignore[arg-type]
ALL = [format for format in ALL if format.kind == "int8" or format.group_size]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ALL, 2)))
def test_parts_may_have_different_formats(first: WeightFormat, second: WeightFormat) -> None:
    """Each part of one matrix has exactly its own values."""
    parts = [drawn(first, 1), drawn(second, 2, 8)]
    format = common_format([first, second])
    assert format.kind == ("int4" if first.kind == second.kind == "int4" else "int8")
    joined = side_by_side(parts, format)
    assert_well_formed(joined, format, (32, 256))
    expected = np.concatenate([float32(part) for part in parts])
    np.testing.assert_allclose(float32(joined), expected, rtol=0, atol=1e-6)


def test_group_size_decides_the_kept_format() -> None:
    assert kept_format(4, 0, 384, False) == WeightFormat("int4", 128)
    assert kept_format(4, 96, 384, True) == WeightFormat("int4", 32, True)
    assert kept_format(4, 0, 40, False) == WeightFormat("int8", 0)
    assert kept_format(8, 40, 40, False) == WeightFormat("int8", 0)
    assert kept_format(8, 256, 384, False) == WeightFormat("int8", 128)
    assert kept_format(4, 24, 48, False) is None
    weight = drawn(WeightFormat("int4", 128, True), 3)
    cut = in_format(weight, WeightFormat("int4", 32, True))
    np.testing.assert_array_equal(float32(cut), float32(weight))
