"""A GPU through its driver alone (CUDA driver API, by ctypes): memory, copies and timings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from statistics import median
from typing import Any

import numpy as np

_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
}
_BATCHES = 5


class CardError(Exception):
    """Missing GPU, or a GPU command that failed."""


class Card:
    """Card `number` of the driver `library`. Work is enqueued on the default stream."""

    def __init__(self, library: str, number: int) -> None:
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise CardError(f"no driver of NVIDIA's cards: {error}; nvidia-smi shows whether there is one") from error
        for name, arguments in _CALLS.items():
            getattr(self._driver, name).argtypes = arguments
        device, context, text = c_int(), c_void_p(), ctypes.create_string_buffer(128)
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), number)
        self._call("cuDeviceGetName", text, len(text), device)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)  # also the stream of kernel launches
        self._call("cuCtxSetCurrent", context)
        self.name = text.value.decode()
        self._events = [c_void_p(), c_void_p()]
        for event in self._events:
            self._call("cuEventCreate", byref(event), 0)

    def allocate(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), max(num_bytes, 1))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def send(self, host: np.ndarray, address: int) -> None:
        self._call("cuMemcpyHtoD_v2", address, host.ctypes.data, host.nbytes)

    def fetch(self, address: int, like: np.ndarray) -> np.ndarray:
        """Return the numbers at `address` once all earlier work is done. CardError if some of it failed."""
        found = np.empty_like(like)
        self._call("cuCtxSynchronize")
        self._call("cuMemcpyDtoH_v2", found.ctypes.data, address, found.nbytes)
        return found

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Enqueue."""
        self._call("cuMemcpyDtoDAsync_v2", to, source, num_bytes, None)

    def seconds(self, run: Callable[[], object], num_runs: int) -> float:
        """Return the seconds of one run: the median of some batches of `num_runs`, after one to warm up."""
        run()
        found = []
        for _ in range(_BATCHES):
            self._call("cuEventRecord", self._events[0], None)
            for _ in range(num_runs):
                run()
            self._call("cuEventRecord", self._events[1], None)
            self._call("cuEventSynchronize", self._events[1])
            milliseconds = c_float()
            self._call("cuEventElapsedTime", byref(milliseconds), *self._events)
            found.append(milliseconds.value / 1000 / num_runs)
        return median(found)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise CardError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
