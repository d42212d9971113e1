"""GPU memory that outlives the process that created it, by the driver's virtual memory calls (CUDA driver API, "Virtual Memory
Management") through ctypes, without a framework.

A process creates the memory, exports it as a descriptor and passes that on. The memory lives as long as any handle or
descriptor of it. Each process that gets the descriptor maps it at its own address. Created by `engine/process/device_arena.py`
for the supervisor; mapped by the workers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

from shm.errors import SharedMemoryError

_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("of_windows", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
}


class DeviceMemory:
    """Memory of card `card` by the driver `library`. SharedMemoryError names a failed call and its error."""

    def __init__(self, library: str, card: int) -> None:
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise SharedMemoryError(f"no driver for device memory that outlives a process: {error}") from error
        for name, arguments in _CALLS.items():
            getattr(self._driver, name).argtypes = arguments
        self._call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), card)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)  # the frameworks use this context too
        self._call("cuCtxSetCurrent", context)
        self._location = _Location(_ON_DEVICE, device)

    def create(self, num_bytes: int) -> int:
        """Return a descriptor of at least `num_bytes` zero bytes."""
        properties, handle, descriptor = self._properties(), c_uint64(), c_int()
        size = self._whole(num_bytes)
        self._call("cuMemCreate", byref(handle), size, byref(properties), 0)
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _DESCRIPTOR, 0)
        self._call("cuMemsetD8_v2", self._map(handle, size), 0, size)
        self._call("cuCtxSynchronize")
        return descriptor.value

    def map(self, descriptor: int, num_bytes: int) -> int:
        """Map the memory behind `descriptor`, `num_bytes` long, until this process ends, and return its address."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _DESCRIPTOR)
        return self._map(handle, self._whole(num_bytes))

    def _map(self, handle: c_uint64, size: int) -> int:
        address, access = c_uint64(), _Access(self._location, _READ_AND_WRITE)
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self._call("cuMemMap", address, size, 0, handle, 0)
        self._call("cuMemSetAccess", address, size, byref(access), 1)
        self._call("cuMemRelease", handle)  # the mapping keeps it alive
        return address.value

    def _properties(self) -> _Properties:
        return _Properties(_PINNED, _DESCRIPTOR, self._location)

    def _whole(self, num_bytes: int) -> int:
        properties, granularity = self._properties(), c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), _MINIMUM)
        return -(-num_bytes // granularity.value) * granularity.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise SharedMemoryError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
