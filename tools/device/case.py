"""A check and a timing of a CUDA row, and what its operands are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ops.cuda.operands import TYPE_BYTES, TYPES
from ops.cuda.packing import in_units, scales_in_units

Values = dict[str, Any]
Outcome = Mapping[str, np.ndarray]


class Case(msgspec.Struct, frozen=True):
    row: str
    text: str
    values: Values  # operands, arrays for memory
    compared: Callable[[Outcome], list[np.ndarray]]  # integers must be equal, others nearly equal
    num_bytes: int
    num_operations: int = 0
    dtype: str = "float32"  # of the arithmetic
    bandwidth_bar: float = 0.0  # minimum share of copy bandwidth

    @property
    def tolerance(self) -> float:
        """Tolerance as a share of the largest number: a card's exponentials and order of summation differ."""
        return {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[self.dtype]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Return pseudo-random numbers; large arrays repeat."""
    numbers = np.random.default_rng(seed).standard_normal(min(int(np.prod(shape)), 1_000_003), np.float32)
    return np.resize(numbers, shape)


def kept(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values in the card's format."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "float16" else values


def numbers(memory: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return memory.view({"float16": np.float16, "float32": np.float32}[dtype]).astype(np.float32)


def named(dtype: str, *names: str) -> Callable[[Outcome], list[np.ndarray]]:
    return lambda outcome: [numbers(outcome[name], dtype) for name in names]


def size(*arrays: np.ndarray | None) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def drawn_weights(outputs: int, inputs: int, kind: str) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Return the packed weights, their scales, and the number of inputs per scale."""
    if kind in TYPE_BYTES and kind != "int8":
        return in_units(kept(random(outputs, inputs, seed=1) / 8, kind), kind), None, 32
    integers = np.resize(
        np.random.default_rng(1).integers(0, 256 if kind == "int8" else 16, 100_003, np.uint8), (outputs, inputs)
    )
    scales = np.abs(random(outputs, inputs // 64, seed=2)) / 500
    return in_units(integers, kind), scales_in_units(scales, kind), 64


def weights_of(
    memory: np.ndarray, scales: np.ndarray | None, kind: str, inputs: int, outputs: int, group: int, num_parts: int = 8
) -> Values:
    return {
        "values": memory.view(np.uint8),
        "scales": scales,
        "offsets": None,
        "type": TYPES[kind],
        "num_inputs": inputs,
        "padded_inputs": inputs,
        "num_outputs": outputs,
        "group_size": group,
        "num_parts": num_parts,
    }
