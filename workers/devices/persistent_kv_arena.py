"""KV arena of a rank in its card's memory, as tensors: the supervisor owns the memory, so its contents outlive the worker.

Made by `workers/runners.py`, used by `paddle.py`. Tensors are made by DLPack (its C structs, version 0.x), without a copy.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np

from shm.device_memory import DeviceMemory

_CODES = {"f": 2, "i": 0, "u": 1}  # kDLFloat, kDLInt, kDLUInt
ON_HOST, ON_GPU = 1, 2  # kDLCPU, kDLCUDA


class _Tensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int),
        ("device_id", c_int),
        ("num_axes", c_int),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
        ("manager", c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, c_void_p)),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, ctypes.c_char_p, c_void_p)


class PersistentKvArena:
    """Arena on card `card`, laid out like `arena`, host memory of which only the marks are written."""

    def __init__(self, library: str, card: int, descriptor: int, arena: memoryview) -> None:
        self._card = card
        self._begin, self._num_bytes = np.frombuffer(arena, np.uint8).ctypes.data, arena.nbytes
        self._address = DeviceMemory(library, card).map(descriptor, arena.nbytes)
        self._given: list[Any] = []  # for the lifetime of the process, like the tensors

    def has(self, memory: np.ndarray) -> bool:
        """Return whether `memory` is part of the host's arena; the self-test at start has a separate cache."""
        return 0 <= memory.ctypes.data - self._begin <= self._num_bytes - memory.nbytes

    def address_of(self, memory: np.ndarray) -> int:
        """Return the address on the card at the same offset as `memory` in the host's arena."""
        assert memory.flags.c_contiguous
        assert self.has(memory), "the memory is not part of the arena"
        return self._address + int(memory.ctypes.data) - self._begin

    def capsule(self, memory: np.ndarray, device_type: int) -> Any:
        """Return a capsule for `from_dlpack` of the memory there."""
        shape = (c_int64 * memory.ndim)(*memory.shape)
        tensor = _Tensor(
            data=self.address_of(memory),
            device_type=device_type,
            device_id=self._card if device_type == ON_GPU else 0,
            num_axes=memory.ndim,
            type_code=_CODES[memory.dtype.kind],
            type_bits=8 * memory.dtype.itemsize,
            type_lanes=1,
            shape=shape,
        )
        self._given += [shape, tensor]
        return _new_capsule(ctypes.addressof(tensor), b"dltensor", None)
