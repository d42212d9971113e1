"""Blocks of GGUF files: random bytes decode to the same numbers as in the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from engine.checkpoint.gguf.file import BLOCKS
from workers.weights.formats.block_types import INTEGERS, decoded_blocks, dequantized_blocks

HALVES: dict[str, list[int]] = {
    "MXFP4": [],
    "Q8_0": [0],
    "Q4_0": [0],
    "Q5_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
    **{name: [0] for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")},
}  # places of scales; otherwise 0 and 2


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Return random bytes, except for scales, which are finite."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    generator = np.random.default_rng(len(name))
    blocks = generator.integers(0, 256, (num_blocks, num_bytes), np.uint8)
    if name == "MXFP4":
        blocks[:, 0] %= 251  # no overflow
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # likewise: bits 12 to 15 of four words are the scale
    for place in HALVES.get(name, [0, 2]):
        blocks[:, place : place + 2] = generator.standard_normal((num_blocks, 1)).astype(np.float16).view(np.uint8)
    return blocks


def test_block_sizes_match_the_format() -> None:
    """Every type has its number and sizes in the format."""
    for number, (name, num_values, num_bytes) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        scale = num_values // gguf.GGML_QUANT_SIZES[kind][0]
        assert (kind.name, scale, num_bytes) == (name, 1, gguf.GGML_QUANT_SIZES[kind][1])


@pytest.mark.parametrize("name", INTEGERS)
def test_blocks_decode_like_the_gguf_package(name: str) -> None:
    blocks = random_blocks(name, 200)
    found = dequantized_blocks(name, blocks)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "MXFP4"])
def test_slices_of_blocks_equal_the_whole(name: str) -> None:
    """Large tensors are decoded in slices, by several threads."""
    blocks = random_blocks(name, 10_001)
    for found, expected in zip(decoded_blocks(name, blocks), INTEGERS[name][1](blocks), strict=True):
        np.testing.assert_array_equal(found, expected)
    parts = [dequantized_blocks(name, blocks[begin : begin + 100]) for begin in range(0, len(blocks), 100)]
    np.testing.assert_array_equal(dequantized_blocks(name, blocks), np.concatenate(parts))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_decode_exactly(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    found = dequantized_blocks(name, stored.view(np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]))
    np.testing.assert_array_equal(found.reshape(8, 32), gguf.quants.dequantize(stored, kind))
