"""NVIDIA's driver (CUDA driver API) through ctypes, without a framework: the only place with its signatures.

Used by `shm/device_memory.py` (memory that outlives a process), `workers/devices/card_kernels.py` and `tools/device`. Streams,
events, modules, functions and graphs are integers here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, TypeVar

import msgspec

_Object = POINTER(c_void_p)
_Address = POINTER(c_uint64)


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("of_windows", c_void_p),
        ("flags", c_ubyte * 8),
    )


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * 64),)


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (_Object, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    # memory that other processes can map
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (_Address, c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (_Address, c_void_p, c_int),
    "cuMemAddressReserve": (_Address, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    # memory of this process
    "cuMemAlloc_v2": (_Address, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    # memory of the host that a card reads and writes by itself
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (_Address, c_void_p, c_uint),
    # memory of another process on this machine
    "cuIpcGetMemHandle": (POINTER(MemoryHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (_Address, MemoryHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    # streams, events, kernels and graphs
    "cuStreamCreate": (_Object, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (_Object, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuModuleLoadData": (_Object, c_char_p),
    "cuModuleGetFunction": (_Object, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _Object),
    "cuGraphInstantiateWithFlags": (_Object, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}

# CUdevice_attribute
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_FOR_ALL_CONTEXTS = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_Error = TypeVar("_Error", bound=Exception)


class CardInfo(msgspec.Struct, frozen=True):
    name: str
    capability: tuple[int, int]  # compute capability; (0, 0): an emulated card
    num_multiprocessors: int
    num_bytes: int  # of memory
    driver_version: int  # the newest CUDA that the driver supports: 1000 * major + 10 * minor


class DriverLibrary:
    """The driver `library`, without a card. Failed calls raise `error`, with the call and the driver's name of the error."""

    def __init__(self, library: str, error: Callable[[str], Exception]) -> None:
        self._error = error
        try:
            self.library = ctypes.CDLL(library)
        except OSError as cause:
            raise error(f"no driver of NVIDIA's cards: {cause}; nvidia-smi shows whether there is one") from cause
        for name, arguments in SIGNATURES.items():
            if (function := getattr(self.library, name, None)) is not None:  # an old driver lacks some
                function.argtypes = arguments
        code = self.library.cuInit(0)
        self._has_cards = code != _NO_DEVICE  # none may be visible
        if code and self._has_cards:
            raise error(f"cuInit: {self.error_name(code)}")

    def cards(self) -> list[CardInfo]:
        """Return the cards that this process may use, without creating a context, which takes memory of a card."""
        count = self.made("cuDeviceGetCount") if self._has_cards else 0
        return [self.info_of(self.made("cuDeviceGet", card)) for card in range(count)]

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.library, name, None)
        if function is None:
            raise self._error(f"{name}: this driver does not have it; install a newer one")
        if code := function(*arguments):
            raise self._error(f"{name}: {self.error_name(code)}")

    def error_name(self, code: int) -> str:
        text = c_char_p()
        self.library.cuGetErrorName(code, byref(text))
        return (text.value or b"").decode() or f"error {code}"

    def made(self, name: str, *arguments: Any) -> int:
        """Return the object or address that a call writes to its first argument."""
        kind = SIGNATURES[name][0]._type_
        made = kind()
        self.call(name, byref(made), *arguments)
        return int(made.value or 0)

    def info_of(self, device: int) -> CardInfo:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), device)
        major, minor, count = (
            self.made("cuDeviceGetAttribute", attribute, device)
            for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS)
        )
        num_bytes, version = self.made("cuDeviceTotalMem_v2", device), self.made("cuDriverGetVersion")
        return CardInfo(text.value.decode(), (major, minor), count, num_bytes, version)


class CudaDriver(DriverLibrary):
    """The driver `library` with card `card` of this process."""

    def __init__(self, library: str, card: int, error: Callable[[str], Exception]) -> None:
        super().__init__(library, error)
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), card)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)  # frameworks use this context, too
        self.call("cuCtxSetCurrent", context)
        self.device = device.value

    def info(self) -> CardInfo:
        return self.info_of(self.device)

    def function(self, code: bytes, entry: str) -> int:
        """Load a compiled kernel (cubin or PTX) and return its function."""
        return self.made("cuModuleGetFunction", self.made("cuModuleLoadData", code), entry.encode())

    def register(self, address: int, num_bytes: int) -> None:
        """Lock whole pages of the host's memory, so that copies from and to them need not wait."""
        self.call("cuMemHostRegister_v2", address, num_bytes, _FOR_ALL_CONTEXTS)

    def address_of(self, name: str) -> int:
        """Return the address of a call, for native code."""
        return int(ctypes.cast(getattr(self.library, name), c_void_p).value or 0)
