"""Arrays of the native table, the Tensor of this backend: an address, a number of rows and a width.

Made by the executors and by the packing functions. All are float32 or int32, with contiguous rows.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ops.modules import Columns

ALIGNMENT = 64


class Rows(msgspec.Struct, frozen=True):
    """Number of rows: `limit`, or read from `counter` (int32 [1]) whenever an op runs, at most `limit`."""

    limit: int
    counter: np.ndarray | None = None

    @property
    def address(self) -> int:
        return 0 if self.counter is None else int(self.counter.ctypes.data)

    @property
    def count(self) -> int:
        return self.limit if self.counter is None else int(self.counter[0])


class Array(msgspec.Struct):
    """Array [rows, width]. `owner` keeps the memory; an array of a recording has neither owner nor address until it is placed.

    If this rank has only some `columns` of a matrix, the array is as wide as the matrix and the other columns are undefined, or
    it is narrower (`whole_width`) and has only these."""

    rows: Rows
    width: int
    address: int = 0
    owner: np.ndarray | None = None
    columns: Columns = ()
    whole_width: int = 0  # 0: its own
    dtype: np.dtype | None = None  # None: that of the owner
    seen: Array | None = None  # in a recording: the array of which this is a view

    @property
    def shape(self) -> list[int]:
        return [self.rows.count, self.width]

    def numpy(self) -> np.ndarray:
        """Return the values in place; later ops may overwrite them."""
        assert self.owner is not None, "this array was recorded and has no memory yet"
        values: np.ndarray = self.owner.reshape(-1)[: self.rows.count * self.width].reshape(self.shape)
        return values if self.dtype is None else values.view(self.dtype)


def array_of(values: np.ndarray) -> Array:
    """Return an array over `values` [n] or [rows, width], which must be contiguous."""
    assert values.flags.c_contiguous, "the rows of an array must be contiguous"
    rows, width = values.shape if values.ndim == 2 else (1, len(values))
    return Array(Rows(rows), width, int(values.ctypes.data), values)


def empty(num_floats: int) -> np.ndarray:
    """Return uninitialized float32 memory aligned to a cache line."""
    memory = np.empty(num_floats * 4 + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_floats * 4].view(np.float32)


def address_of(tensor: Any) -> int:
    """Return the address of an Array, a Paddle tensor on the CPU or a numpy array; 0 for None."""
    if tensor is None:
        return 0
    if isinstance(tensor, Array):
        return tensor.address
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def rows_of(tensor: Any) -> Rows:
    return tensor.rows if isinstance(tensor, Array) else Rows(int(tensor.shape[0]))
