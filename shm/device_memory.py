"""GPU memory that outlives the process that created it, by the driver's virtual memory calls (CUDA driver API, "Virtual Memory
Management") through ctypes, without a framework.

A process creates the memory, exports it as a descriptor and passes that on. The memory lives as long as any handle or
descriptor of it. Each process that gets the descriptor maps it at its own address. Created by `engine/process/device_arena.py`
for the supervisor, and by workers for their weights; mapped by the workers.
"""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import byref

from shm.cuda_driver import AccessDescription, AllocationProperties, CudaDriver, Location
from shm.errors import SharedMemoryError

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 1, 3, 0


class NotSharedError(SharedMemoryError):
    """The driver cannot pass this card's memory to other processes (WSL2, old drivers)."""


class DeviceMemory:
    """Memory of card `card` by the driver `library`. SharedMemoryError names a failed call and its error."""

    def __init__(self, library: str, card: int) -> None:
        self._driver = CudaDriver(library, card, SharedMemoryError)
        self._call = self._driver.call
        self._location = Location(_ON_DEVICE, self._driver.device)

    def create(self, num_bytes: int) -> int:
        """Return a descriptor of at least `num_bytes` zero bytes, which this process has mapped once, as the others will.
        Raises NotSharedError if the card has room, but its memory cannot be passed on."""
        try:
            descriptor = self.allocate(num_bytes)
            address = self.map(descriptor, num_bytes)
        except SharedMemoryError as error:
            if _OUT_OF_MEMORY in str(error):
                raise
            raise NotSharedError(str(error)) from error
        self._call("cuMemsetD8_v2", address, 0, self._whole(num_bytes))
        self._call("cuCtxSynchronize")
        return descriptor

    def allocate(self, num_bytes: int) -> int:
        """Return a descriptor of at least `num_bytes` with undefined contents, which no process has mapped."""
        handle = self._driver.made("cuMemCreate", self._whole(num_bytes), byref(self._properties()), 0)
        try:
            return self._driver.made("cuMemExportToShareableHandle", handle, _DESCRIPTOR, 0)
        finally:
            self._call("cuMemRelease", handle)  # the descriptor keeps it alive

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo `map`."""
        self._call("cuMemUnmap", address, self._whole(num_bytes))
        self._call("cuMemAddressFree", address, self._whole(num_bytes))

    def map(self, descriptor: int, num_bytes: int) -> int:
        """Map the memory behind `descriptor`, `num_bytes` long, and return its address."""
        handle = self._driver.made("cuMemImportFromShareableHandle", descriptor, _DESCRIPTOR)
        return self._map(handle, self._whole(num_bytes))

    def _map(self, handle: int, size: int) -> int:
        access = AccessDescription(self._location, _READ_AND_WRITE)
        with ExitStack() as always, ExitStack() as undone:
            always.callback(self._call, "cuMemRelease", handle)  # the mapping keeps it alive
            address = self._driver.made("cuMemAddressReserve", size, 0, 0, 0)
            undone.callback(self._call, "cuMemAddressFree", address, size)
            self._call("cuMemMap", address, size, 0, handle, 0)
            undone.callback(self._call, "cuMemUnmap", address, size)
            self._call("cuMemSetAccess", address, size, byref(access), 1)
            undone.pop_all()
        return address

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(_PINNED, _DESCRIPTOR, self._location)

    def _whole(self, num_bytes: int) -> int:
        granularity = self._driver.made("cuMemGetAllocationGranularity", byref(self._properties()), _MINIMUM)
        return -(-num_bytes // granularity) * granularity
