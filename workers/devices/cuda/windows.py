"""Memory that ranks on cards of their own lend each other, for gathered columns (`ops/cuda/exchange.cu`).

Made by the device of a rank at its first gather, when its group has met, and lent anew in each epoch of the group: a rank that
was started again has other memory, and counts begin again. The communicator passes the driver's handles of memory on.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ops.cuda.array import array_on
from ops.cuda.table import Windows
from shm.cuda_driver import CudaDriver, MemoryHandle
from workers.devices.capabilities import DeviceError
from workers.devices.cuda.memory import StreamMemory
from workers.rank_group.communicator import Communicator

_LINE_BYTES = 64  # LINE_BYTES in exchange.cu
_UNIT_BYTES = 2 << 20  # of the driver: other memory in the same unit would be lent as well
_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_MOST_BYTES = (1 << 31) - 64  # of a half, which kernels count in 32 bits


class LentWindows:
    """This rank's memory, and that of the others as it is mapped here. `memory`: of the card, in the order of its stream."""

    def __init__(self, driver: CudaDriver, memory: StreamMemory, communicator: Communicator) -> None:
        self._driver, self._memory, self._communicator = driver, memory, communicator
        room = len(communicator.rank_group().buffers) // 2  # what native ops need for the same arrays in float32
        half_bytes = min(room // _LINE_BYTES * _LINE_BYTES + _LINE_BYTES, _MOST_BYTES)
        whole = -(-(_LINE_BYTES + 2 * half_bytes) // _UNIT_BYTES) * _UNIT_BYTES
        self._own = driver.made("cuMemAlloc_v2", whole)
        memory.lend(communicator.memory[:4])
        epoch = communicator.memory[:4].view(np.int32)
        addresses = array_on(memory, np.zeros(8 * communicator.count, np.uint8))
        self._windows = Windows(addresses, epoch, half_bytes, communicator.place, communicator.count)
        self._mapped: dict[bytes, int] = {}  # addresses by handle
        self._epoch = 0  # in which they were lent; 0: never

    def now(self) -> Windows:
        """Return the windows of the present epoch. All ranks call it together; DeviceError on all if one cannot share."""
        if self._epoch != self._communicator.epoch:
            self._lend()
        return self._windows

    def check(self) -> None:
        """Raise RankGroupBroken if a rank has gone since they were lent: what the ranks gathered is not whole then."""
        if self._epoch and self._communicator.is_elsewhere:
            self._communicator.barrier()

    def _lend(self) -> None:
        driver, communicator = self._driver, self._communicator
        epoch = communicator.epoch
        self._memory.write(self._own, np.array([0, epoch], np.int64).astype(np.int32))  # after all work of earlier epochs
        handle, fault = MemoryHandle(), ""
        try:
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except DeviceError as error:
            fault = str(error)
        handles = [each.tobytes() for each in communicator.all_gather(np.frombuffer(bytes(handle), np.uint8))]
        for gone in self._mapped.keys() - set(handles):
            driver.call("cuIpcCloseMemHandle", self._mapped.pop(gone))
        addresses = np.zeros(communicator.count, np.uint64)
        for place, other in enumerate(handles):
            if place == communicator.place or fault:
                addresses[place] = self._own
                continue
            try:
                if other not in self._mapped:
                    self._mapped[other] = driver.made("cuIpcOpenMemHandle_v2", MemoryHandle.from_buffer_copy(other), _PEERS)
                addresses[place] = self._mapped[other]
            except DeviceError as error:
                fault = f"the memory of the card of rank {place} of the group cannot be mapped: {error}"
        faults = communicator.all_gather(np.array([bool(fault)]))
        if faults.any():
            raise DeviceError(fault or f"rank {int(faults.argmax())} of the group cannot share memory of its card")
        self._memory.write(self._windows.addresses.address, addresses.view(np.uint8))
        self._epoch = epoch
