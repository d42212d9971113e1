"""A card by its driver: one stream, memory, transfers, events and graphs. No framework is loaded.

Made by `workers/runners.py` with CUDA ops. Waiting for the card sleeps, so that it takes no core from the other actors.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.files import user_cache
from engine.checkpoint.model_config import ModelConfig
from engine.errors import OptionError
from ops.cuda.array import CudaArray, array_on, empty_on
from ops.cuda.library import BuildError, RowError
from ops.cuda.operands import operands
from ops.cuda.table import describe, make_table
from shm.cuda_driver import CudaDriver
from workers.devices.capabilities import Capabilities, DeviceError
from workers.devices.card_kernels import card_library
from workers.devices.cuda.memory import StreamMemory
from workers.devices.cuda.shelf import WeightShelf
from workers.devices.cuda.windows import RankMemory
from workers.devices.enqueued import Fetch, Traffic
from workers.devices.host_memory import HostMemory
from workers.devices.persistent_kv_arena import PersistentKvArena
from workers.rank_group.peers import Peers

_OWN_STREAM = 1  # CU_STREAM_NON_BLOCKING
_SLEEPS_WITHOUT_TIME = 3  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_THREAD_MAY_ALLOCATE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_LEAST_LANDING = 1 << 10  # values, so that small fetches, which grow with the batch, share one buffer
_FAULT_BYTES = 256  # of a text that ranks exchange
_ENGINE_ERRORS = (DeviceError, RowError, BuildError)


class CudaDevice:
    """Card `card` of the driver `library`. `directory`: of compiled kernels. `peers`: the ranks that compute `model` with this
    one, on other cards. `weight_shelf`: sockets that outlive this process; -1: none. Raises BuildError if kernels cannot be
    compiled for it, DeviceError for failed calls of the driver."""

    place = None
    rank_group = None
    fallbacks: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        library: str,
        card: int,
        dtype: str,
        directory: Path,
        lasting: PersistentKvArena | None = None,
        peers: Peers | None = None,
        model: ModelConfig | None = None,
        weight_shelf: tuple[int, int] = (-1, -1),
    ) -> None:
        self._driver = driver = CudaDriver(library, card, DeviceError)
        self._stream = driver.made("cuStreamCreate", _OWN_STREAM)
        self._memory, self._pinned = StreamMemory(driver, self._stream), HostMemory(library, card)
        self._rows = card_library(driver, directory, dtype)
        self.fingerprint = f"{driver.info()} {self._rows.name}"  # what the numbers of its kernels depend on
        self._lasting = lasting
        self._sent: dict[int, int] = {}  # by address of a staging: the event after its last copy
        self._landings: dict[
            str, tuple[np.ndarray, int]
        ] = {}  # of fetches, by key: pinned memory, and the event after the copy
        self._places = np.zeros(0, np.int32)  # of `put`: host memory that the card copies
        self.traffic = Traffic()
        self._peers = peers
        self._lent = None if peers is None or model is None else RankMemory(driver, self._memory, peers, model, dtype)
        columns, experts = (None, None) if self._lent is None else (self._lent.columns, self._lent.experts)
        self._shelf: WeightShelf | None = None
        if min(weight_shelf) >= 0:
            self._shelf = WeightShelf(library, card, *weight_shelf, lambda: driver.call("cuStreamSynchronize", self._stream))
        self.ops = make_table(
            self._rows,
            self._memory,
            lambda: self._stream,
            dtype,
            None if columns is None else columns.now,
            None if experts is None else experts.now,
            self._shelf,
        )
        self._done = self._event()
        self.capabilities = Capabilities(f"gpu:{card}", True, lasting is not None, ("float32", "bfloat16"))

    def tensor(self, host: np.ndarray) -> CudaArray:
        return array_on(self._memory, host)

    def upload(self, host: np.ndarray, tensor: CudaArray) -> None:
        self.traffic.num_to_device += 1
        self._memory.write(tensor.address, np.ascontiguousarray(host))

    def arena(self, memory: np.ndarray) -> CudaArray:
        if self._lasting is not None and self._lasting.has(memory):
            address: int = self._lasting.address_of(memory)
            return CudaArray(self._memory, address, memory.shape, str(memory.dtype), self._lasting)
        address, owner = self._memory.allocate(memory.nbytes, is_lasting=True)
        self._memory.clear(address, memory.nbytes)
        return CudaArray(self._memory, address, memory.shape, str(memory.dtype), owner)

    def lend(self, memory: np.ndarray, room: np.ndarray | None = None) -> None:
        """Let ops read shared memory of the host, which is mapped in whole pages (`StreamMemory.lend`)."""
        self._memory.lend(memory, room)

    def staging(self, num_values: int) -> np.ndarray:
        return self._pinned.array(num_values, np.dtype(np.int32))

    def send(self, staging: np.ndarray, tensor: CudaArray, count: int) -> None:
        self.traffic.num_to_device += 1
        address = staging.ctypes.data
        self._driver.call("cuMemcpyHtoDAsync_v2", tensor.address, address, 4 * count, self._stream)
        if address not in self._sent:
            self._sent[address] = self._event()
        self._driver.call("cuEventRecord", self._sent[address], self._stream)

    def settle(self, staging: np.ndarray) -> None:
        sent = self._sent.get(staging.ctypes.data)
        if sent is not None:
            self._wait(sent)

    def put(self, tensor: CudaArray, places: np.ndarray, values: np.ndarray) -> None:
        if not len(places):
            return
        count = len(places)
        if len(self._places) < 2 * count:
            self._places = self.staging(4 * count)
        self.settle(self._places)
        self._places[:count], self._places[count : 2 * count] = places, values
        sent = empty_on(self._memory, [2, count], "int32")
        self.send(self._places, sent, 2 * count)
        given = {"to": tensor, "places": sent[0], "values": sent[1], "count": count}
        self._rows.run("Scatter", operands("Scatter", describe, **given), self._stream)

    def fetch(self, key: str, tensor: CudaArray) -> Fetch:
        self.traffic.num_to_host += 1
        size = tensor.size
        if key not in self._landings or self._landings[key][0].size < size:
            room = 1 << (max(size, _LEAST_LANDING) - 1).bit_length()  # earlier ones are never freed, so that they double
            values = self._pinned.array(room, np.dtype(tensor.dtype))
            self._landings[key] = values, self._event()
        values, event = self._landings[key]
        self._driver.call("cuMemcpyDtoHAsync_v2", values.ctypes.data, tensor.address, 4 * size, self._stream)
        self._driver.call("cuEventRecord", event, self._stream)
        return _Landing(self, event, values[:size].reshape(tensor.shape))

    def capture(self, run: Callable[[], object], group: int = 0) -> CudaGraph:
        graph, fault = None, ""
        try:
            graph = CudaGraph(self._driver, self._stream, self._memory, self._lent, run, group)
        except _ENGINE_ERRORS as error:
            fault = str(error)
        if (fault := self.agreed_fault(fault)) or graph is None:
            raise DeviceError(f"{self.capabilities.place}: {fault}")
        return graph

    def agreed_fault(self, fault: str) -> str:
        if self._peers is None:
            return fault
        word = np.zeros(_FAULT_BYTES, np.uint8)
        text = fault.encode()[:_FAULT_BYTES]
        word[: len(text)] = np.frombuffer(text, np.uint8)
        others = [bytes(other).rstrip(b"\0").decode(errors="replace") for other in self._peers.gather_values(word)]
        return fault or next((f"another rank found that {other}" for other in others if other), "")

    def finish(self) -> None:
        if self._lent is None:
            return
        self._driver.call("cuEventRecord", self._done, self._stream)
        self._wait(self._done)

    def address(self, tensor: CudaArray) -> int:
        return tensor.address

    def memory_bytes(self) -> int:
        return self._memory.num_bytes + (0 if self._shelf is None else self._shelf.num_bytes)

    def release_unused(self) -> None:
        self._memory.release_unused()

    def threads_of(self, num_ranks: int) -> AbstractContextManager[None]:
        """Do nothing: packing is numpy's."""
        return contextlib.nullcontext()

    def _event(self) -> int:
        return self._driver.made("cuEventCreate", _SLEEPS_WITHOUT_TIME)

    def _wait(self, event: int) -> None:
        self._wait_for(event)
        if self._lent is not None:
            self._lent.check()

    def _wait_for(self, event: int) -> None:
        status = self._driver.library.cuEventQuery(ctypes.c_void_p(event))
        if status == 0:
            return
        if status != _NOT_READY:
            raise DeviceError(f"cuEventQuery: {self._driver.error_name(status)}")
        begin_ns = time.monotonic_ns()
        self._driver.call("cuEventSynchronize", event)
        self.traffic.waited_ns += time.monotonic_ns() - begin_ns


class _Landing:
    """Fetch that is done when its event is."""

    def __init__(self, device: Any, event: int, values: np.ndarray) -> None:
        self._device, self._event, self._values = device, event, values

    def wait(self) -> np.ndarray:
        self._device._wait(self._event)
        return self._values


class CudaGraph:
    """Graph of the work that `run` enqueues. It runs twice before: first kernels are compiled, and then, while the results of
    the first run are still there, all memory is taken from the driver that the captured run needs."""

    def __init__(
        self,
        driver: CudaDriver,
        stream: int,
        memory: StreamMemory,
        lent: RankMemory | None,
        run: Callable[[], object],
        group: int,
    ) -> None:
        self._driver, self._stream, self._lent, self._memory = driver, stream, lent, memory
        with memory.captured(group):
            for _ in range(2):
                run()
            driver.call("cuStreamSynchronize", stream)
            driver.call("cuStreamBeginCapture_v2", stream, _THREAD_MAY_ALLOCATE)
            graph, error = ctypes.c_void_p(), None
            try:
                run()
            except _ENGINE_ERRORS as caught:
                error = caught
            status = driver.library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if error is not None:
            raise error
        if status:
            raise DeviceError(f"cuStreamEndCapture: {driver.error_name(status)}")
        self._graph = driver.made("cuGraphInstantiateWithFlags", graph, 0)
        memory.num_graphs += 1
        driver.call("cuGraphDestroy", graph)

    def replay(self) -> None:
        if self._lent is not None:
            self._lent.now()
        self._driver.call("cuGraphLaunch", self._graph, self._stream)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            self._memory.num_graphs -= 1
            with contextlib.suppress(DeviceError):
                self._driver.call("cuGraphExecDestroy", self._graph)


def cuda_device(
    library: str,
    dtype: str,
    lasting: PersistentKvArena | None,
    peers: Peers,
    model: ModelConfig,
    weight_shelf: tuple[int, int],
) -> CudaDevice:
    """Return the card of a rank. Raises OptionError if it cannot be used: there is no other way to run CUDA ops."""
    others = None if peers.are_none else peers
    try:
        return CudaDevice(library, peers.rank, dtype, user_cache() / "cuda", lasting, others, model, weight_shelf)
    except (BuildError, DeviceError) as error:
        raise OptionError(f"--ops cuda: {error}") from error
