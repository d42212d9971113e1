"""Blocks of keys and values in the layout of CUDA's rows, implemented a second time in numpy, as the reference for
`cache.h`."""

from __future__ import annotations

import numpy as np


def blocks_of(numbers: np.ndarray, num_heads: int, block_size: int, dtype: str) -> np.ndarray:
    """Return float32 [slots, heads * dim] as uint8 [blocks, bytes of a block]."""
    num_blocks = len(numbers) // block_size
    if dtype == "int8":
        heads = numbers.reshape(num_blocks, block_size * num_heads, -1)
        largest = np.abs(heads).max(axis=-1, keepdims=True)
        integers = np.rint(heads * np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest)))
        parts = [np.nan_to_num(integers).astype(np.int8), largest / np.float32(127)]  # stale slots may hold anything
    else:
        parts = [encode(numbers, dtype)]
    return np.concatenate([np.ascontiguousarray(part).reshape(num_blocks, -1).view(np.uint8) for part in parts], axis=1)


def numbers_of(blocks: np.ndarray, num_heads: int, dim: int, block_size: int, dtype: str) -> np.ndarray:
    """Invert `blocks_of`."""
    count = block_size * num_heads * dim
    if dtype == "int8":
        integers = blocks[:, :count].view(np.int8).astype(np.float32).reshape(len(blocks), -1, dim)
        scales = np.ascontiguousarray(blocks[:, count:]).view(np.float32)
        return np.asarray(integers * scales[..., None]).reshape(-1, num_heads * dim)
    return decode(blocks, dtype).reshape(-1, num_heads * dim)


def encode(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "float8":
        values = _float8_values()
        places = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(numbers), side="left")
        middle = np.abs(numbers) == np.append((values[1:] + values[:-1]) / 2, np.inf)[places]
        places = places + (middle & (places % 2 == 1))  # ties to even
        return (places | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)
    return numbers.astype({"float32": np.float32, "float16": np.float16}[dtype])


def decode(blocks: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8":
        magnitudes = np.append(_float8_values(), np.nan)[blocks & 0x7F].astype(np.float32)
        return np.where(blocks & 0x80, -magnitudes, magnitudes)
    return blocks.view({"float32": np.float32, "float16": np.float16}[dtype]).astype(np.float32)


def _float8_values() -> np.ndarray:
    """Return the values of the codes 0 to 126 (OCP 8-bit floating point specification, E4M3)."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, (codes & 7) / 8
    return np.where(exponents == 0, mantissas * 2.0**-6, (1 + mantissas) * 2.0 ** (exponents - 7.0))
