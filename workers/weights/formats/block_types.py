"""Types of tensors in GGUF files: plain floats, and blocks of integers with scales.

Used by `gguf.py`. Integers are kept in 4 bits where that loses nothing, else in 8 (5 and 6 bits, IQ4 and most grids), because
the kernels have nothing in between. Scales that are halves stay halves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ops import _cpu
from ops.weight_format import DOUBLED_E2M1, WeightFormat
from workers.weights.formats import blocks, grid_blocks, superblocks
from workers.weights.formats.blocks import Parts
from workers.weights.formats.mxfp4 import MXFP4

PLAIN: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
INTEGERS: dict[str, tuple[WeightFormat, Callable[[np.ndarray], Parts]]] = {
    "Q8_0": (WeightFormat("int8", 32, scales="float16"), blocks.q8_0),
    "Q4_0": (WeightFormat("int4", 32, scales="float16"), blocks.q4_0),
    "Q4_1": (WeightFormat("int4", 32, True, scales="float16"), blocks.q4_1),
    "Q5_0": (WeightFormat("int8", 32, scales="float16"), blocks.q5_0),
    "Q5_1": (WeightFormat("int8", 32, True, scales="float16"), blocks.q5_1),
    "Q2_K": (WeightFormat("int4", 16, True), superblocks.q2_k),
    "Q3_K": (WeightFormat("int4", 16), superblocks.q3_k),
    "Q4_K": (WeightFormat("int4", 32, True), superblocks.q4_k),
    "Q5_K": (WeightFormat("int8", 32, True), superblocks.q5_k),
    "Q6_K": (WeightFormat("int8", 16), superblocks.q6_k),
    "IQ4_NL": (WeightFormat("int8", 32, scales="float16"), blocks.iq4_nl),
    "IQ4_XS": (WeightFormat("int8", 32), superblocks.iq4_xs),
    "IQ1_S": (WeightFormat("int4", 32, True), grid_blocks.iq1_s),
    "IQ1_M": (WeightFormat("int8", 16), grid_blocks.iq1_m),
    "IQ2_XXS": (WeightFormat("int8", 32), grid_blocks.iq2_xxs),
    "IQ2_XS": (WeightFormat("int8", 16), grid_blocks.iq2_xs),
    "IQ2_S": (WeightFormat("int8", 16), grid_blocks.iq2_s),
    "IQ3_XXS": (WeightFormat("int8", 32), grid_blocks.iq3_xxs),
    "IQ3_S": (WeightFormat("int4", 32, True), grid_blocks.iq3_s),
    "TQ1_0": (WeightFormat("int4", 128, scales="float16"), superblocks.tq1_0),
    "TQ2_0": (WeightFormat("int4", 128, scales="float16"), superblocks.tq2_0),
    "MXFP4": (MXFP4, blocks.mxfp4),
}
_SLICE = 1 << 17  # bytes decoded at a time, so that a thread's intermediate results stay in its cache
_ZERO = 8  # represents 0 in 4 bits without offsets


def decoded_blocks(type_name: str, blocks: np.ndarray) -> Parts:
    """Return the integers of blocks, uint8 [n, bytes of a block], with their scales and offsets (see `blocks.py`)."""
    values, scales, offsets = _in_slices(INTEGERS[type_name][1], blocks)
    assert values is not None
    assert scales is not None
    return values, scales, offsets


def dequantized_blocks(type_name: str, blocks: np.ndarray) -> np.ndarray:
    """Return float32 [n, values of a block] from blocks, uint8 [n, bytes of a block], bit for bit like llama.cpp's reference
    code."""
    if type_name in PLAIN:
        values = np.ascontiguousarray(blocks).view(PLAIN[type_name])
        if type_name == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32, copy=False)
    (floats,) = _in_slices(lambda some: (_dequantized(type_name, some),), blocks)
    assert floats is not None
    return floats


def _in_slices(
    decode: Callable[[np.ndarray], tuple[np.ndarray | None, ...]], blocks: np.ndarray
) -> Sequence[np.ndarray | None]:
    """Return the arrays that `decode` returns, computed in slices by as many threads as the kernels use."""
    size = max(_SLICE // blocks.shape[1], 1)
    if len(blocks) <= size:
        return decode(blocks)
    first = decode(blocks[:1])
    parts = [None if part is None else np.empty((len(blocks), *part.shape[1:]), part.dtype) for part in first]

    def fill(begin: int) -> None:
        for whole, part in zip(parts, decode(blocks[begin : begin + size]), strict=True):
            if whole is not None and part is not None:
                whole[begin : begin + size] = part

    with ThreadPoolExecutor(_cpu.num_threads(), "decode") as pool:
        deque(pool.map(fill, range(0, len(blocks), size)), maxlen=0)  # raises what a thread raised
    return parts


def _dequantized(type_name: str, blocks: np.ndarray) -> np.ndarray:
    format, decode = INTEGERS[type_name]
    integers, scales, offsets = decode(blocks)
    if format.kind == "float4":
        integers = DOUBLED_E2M1[integers]
    elif format.kind == "int4" and not format.has_offsets:
        integers = integers.view(np.int8) - np.int8(_ZERO)
    floats: np.ndarray = integers.reshape(*scales.shape, -1).astype(np.float32)
    floats *= scales[..., None]
    if offsets is not None:
        floats -= offsets[..., None]
    return floats.reshape(len(blocks), -1)
