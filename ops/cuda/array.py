"""Arrays of CUDA's ops: an address on a card with a shape and a type, and the memory that they come from."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),  # its bits
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
}


class CardMemory(Protocol):
    """Memory of a card. Calls are in the order of its stream."""

    def allocate(self, num_bytes: int, *, is_lasting: bool = False) -> tuple[int, Any]:
        """Return the address of at least `num_bytes`, aligned to 256 bytes, and an object: the memory is free when the object
        is deleted. `is_lasting`: as weights are, not for one op."""

    def host_address(self, values: np.ndarray) -> int:
        """Return the address by which the card reads `values` of the host."""

    def write(self, address: int, values: np.ndarray) -> None:
        """Copy contiguous `values` there."""

    def read(self, address: int, values: np.ndarray) -> None:
        """Wait for the card, and copy from there into contiguous `values`."""


class CudaArray:
    """Contiguous numbers at an `address` in `memory`; `owner` keeps them. `cut`: the array has a rank's columns, from this one
    on of so many; None: all."""

    __slots__ = ("address", "cut", "dtype", "memory", "owner", "shape")

    def __init__(self, memory: CardMemory, address: int, shape: Sequence[int], dtype: str, owner: Any) -> None:
        self.memory, self.address, self.shape, self.dtype, self.owner = memory, address, list(shape), dtype, owner
        self.cut: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize

    def data_ptr(self) -> int:
        return self.address

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: slice | int) -> CudaArray:
        """Return consecutive rows, or one, in the same memory."""
        of_row = self.num_bytes // max(1, self.shape[0])
        if isinstance(place, slice):
            begin, end, step = place.indices(self.shape[0])
            assert step == 1, f"{place} takes rows that are not consecutive"
            return CudaArray(
                self.memory, self.address + begin * of_row, [max(0, end - begin), *self.shape[1:]], self.dtype, self
            )
        assert 0 <= place < self.shape[0], f"row {place} of {self.shape[0]}"
        return CudaArray(self.memory, self.address + place * of_row, self.shape[1:], self.dtype, self)

    def reshape(self, shape: Sequence[int]) -> CudaArray:
        """Return the same numbers in another shape, of which one size may be -1."""
        known = math.prod(size for size in shape if size >= 0)
        whole = [size if size >= 0 else self.size // max(1, known) for size in shape]
        assert math.prod(whole) == self.size, f"{self.shape} cannot become {list(shape)}"
        return CudaArray(self.memory, self.address, whole, self.dtype, self)

    def numpy(self) -> np.ndarray:
        """Return a copy on the host; bfloat16 as float32."""
        values = np.empty(self.shape, DTYPES[self.dtype])
        self.memory.read(self.address, values)
        if self.dtype != "bfloat16":
            return values
        return (values.astype(np.uint32) << 16).view(np.float32)


def array_on(memory: CardMemory, values: np.ndarray, dtype: str = "") -> CudaArray:
    """Return a copy of `values` on the card. `dtype`: "bfloat16" for its bits."""
    name = dtype or str(values.dtype)
    assert DTYPES[name] == values.dtype, f"{values.dtype} is not {name}"
    address, owner = memory.allocate(values.nbytes, is_lasting=True)
    memory.write(address, np.ascontiguousarray(values))
    return CudaArray(memory, address, values.shape, name, owner)


def empty_on(memory: CardMemory, shape: Sequence[int], dtype: str) -> CudaArray:
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    address, owner = memory.allocate(num_bytes)
    return CudaArray(memory, address, shape, dtype, owner)


class HostMemory:
    """Memory of the host, for the emulation of kernels without a driver."""

    def allocate(self, num_bytes: int, *, is_lasting: bool = False) -> tuple[int, Any]:
        memory = np.full(num_bytes + 256, 0xFF, np.uint8)  # NaN, as floats
        start = -memory.ctypes.data % 256
        return memory.ctypes.data + start, memory

    def host_address(self, values: np.ndarray) -> int:
        return int(values.ctypes.data)

    def write(self, address: int, values: np.ndarray) -> None:
        _view(address, values)[...] = values.reshape(-1).view(np.uint8)

    def read(self, address: int, values: np.ndarray) -> None:
        values.reshape(-1).view(np.uint8)[...] = _view(address, values)


def _view(address: int, values: np.ndarray) -> np.ndarray:
    if not values.nbytes:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * values.nbytes).from_address(address))
