"""Memory that ranks on cards of their own lend each other, for gathered columns and shared experts (`ops/cuda/exchange.cu`).

Made by the device of a rank. Lent at its first exchange, when its group has met, and anew in each epoch of the group: a rank
that was started again has other memory, and counts begin again. The communicator passes the driver's handles of memory on.
"""

from __future__ import annotations

import ctypes

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from ops.cuda.array import array_on
from ops.cuda.sharing import OfferLayout, SharedMemory, Windows
from shm.cuda_driver import CudaDriver, MemoryHandle
from workers.devices.capabilities import DeviceError
from workers.devices.cuda.memory import StreamMemory
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank
from workers.rank_group.peers import Peers

_LINE_BYTES = 64  # LINE_BYTES in exchange.cu
_UNIT_BYTES = 2 << 20  # of the driver: other memory in the same unit would be lent as well
_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class LentWindows:
    """`num_bytes` of this rank's card, and the memory of the others of its group as it is mapped here. `memory`: of the card,
    in the order of its stream."""

    def __init__(self, driver: CudaDriver, memory: StreamMemory, communicator: Communicator, num_bytes: int) -> None:
        self._driver, self._memory, self._communicator = driver, memory, communicator
        whole = -(-num_bytes // _UNIT_BYTES) * _UNIT_BYTES
        self._own = driver.made("cuMemAlloc_v2", whole)
        memory.lend(communicator.memory[:4])
        epoch = communicator.memory[:4].view(np.int32)
        addresses = array_on(memory, np.zeros(8 * communicator.count, np.uint8))
        self._windows = Windows(addresses, epoch, communicator.place, communicator.count, self._own, num_bytes)
        self._mapped: dict[bytes, int] = {}  # addresses by handle
        self._epoch = 0  # in which they were lent; 0: never

    def now(self) -> Windows:
        """Return the windows of the present epoch. All ranks call it together; DeviceError on all if one cannot share."""
        if self._epoch != self._communicator.epoch:
            self._lend()
        return self._windows

    def check(self) -> None:
        """Raise RankGroupBroken if a rank has gone since they were lent: what the ranks exchanged is not whole then."""
        if self._epoch and self._communicator.is_elsewhere:
            self._communicator.barrier()

    def _lend(self) -> None:
        driver, communicator = self._driver, self._communicator
        epoch, places = communicator.epoch, communicator.places
        self._memory.write(self._own, np.array([0, epoch], np.int64).astype(np.int32))  # after all work of earlier epochs
        handle, fault = MemoryHandle(), ""
        try:
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except DeviceError as error:
            fault = str(error)
        gathered = communicator.all_gather(np.frombuffer(bytes(handle), np.uint8))
        handles = {place: gathered[place].tobytes() for place in places}
        for gone in self._mapped.keys() - set(handles.values()):
            driver.call("cuIpcCloseMemHandle", self._mapped.pop(gone))
        addresses = np.zeros(communicator.count, np.uint64)
        for place, other in handles.items():
            if place == communicator.place or fault:
                addresses[place] = self._own
                continue
            try:
                if other not in self._mapped:
                    self._mapped[other] = driver.made("cuIpcOpenMemHandle_v2", MemoryHandle.from_buffer_copy(other), _PEERS)
                addresses[place] = self._mapped[other]
            except DeviceError as error:
                fault = f"the memory of the card of rank {place} of the group cannot be mapped: {error}"
        faults = communicator.all_gather(np.array([bool(fault)]))[list(places)]
        if faults.any():
            raise DeviceError(fault or f"rank {places[int(faults.argmax())]} of the group cannot share memory of its card")
        self._memory.write(self._windows.addresses.address, addresses.view(np.uint8))
        self._epoch = epoch


class SharedExpertsMemory:
    """The windows of the ranks that share experts, and `owners`, the copy of `experts.owners` on this rank's card."""

    def __init__(
        self, driver: CudaDriver, memory: StreamMemory, peers: Peers, experts: ExpertRank, model: ModelConfig, dtype: str
    ) -> None:
        assert model.experts is not None, "the model has no experts"
        self._memory, self._experts = memory, experts
        group = experts.rank_group
        layout = OfferLayout.of(group.max_rows, group.num_ranks, model.experts.num_chosen, model.hidden_size, dtype)
        self.windows = LentWindows(driver, memory, experts.communicator, layout.num_bytes)
        self._layout, self._gather = layout, peers.gather_values
        self.owners = array_on(memory, experts.owners)
        self._placed = experts.epoch, experts.version  # of the owners on the card
        if experts.counts is not None:
            memory.lend(experts.counts)

    def now(self) -> SharedMemory:
        """Return the memory of the present epoch, after changes of `owners`, which no work may read meanwhile. All ranks call
        it together."""
        placed = self._experts.epoch, self._experts.version
        if placed != self._placed:
            self._memory.write(self.owners.address, self._experts.owners)
            self._placed = placed
        return SharedMemory(self.windows.now(), self._layout, self._gather)


class RankMemory:
    """All memory that a rank lends those that it computes with. `columns`, `experts`: None if it shares none."""

    def __init__(self, driver: CudaDriver, memory: StreamMemory, peers: Peers, model: ModelConfig, dtype: str) -> None:
        self.columns: LentWindows | None = None
        self.experts: SharedExpertsMemory | None = None
        if (communicator := peers.communicator) is not None:
            group = None if peers.experts is None else peers.experts.rank_group
            room = len(communicator.rank_group(group).buffers)  # what native ops need for the same arrays in float32
            self.columns = LentWindows(driver, memory, communicator, room + 3 * _LINE_BYTES)
        if peers.experts is not None:
            self.experts = SharedExpertsMemory(driver, memory, peers, peers.experts, model, dtype)
            peers.owners = self.experts.owners
        both = self.columns, None if self.experts is None else self.experts.windows
        self._windows = [windows for windows in both if windows is not None]

    def now(self) -> None:
        """Lend it in the present epoch, before a replay."""
        if self.columns is not None:
            self.columns.now()
        if self.experts is not None:
            self.experts.now()

    def check(self) -> None:
        """Raise RankGroupBroken if a rank has gone since it was lent."""
        for windows in self._windows:
            windows.check()
