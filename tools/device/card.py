"""A GPU through its driver alone (CUDA driver API, by ctypes): memory, copies and timings."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_void_p
from statistics import median

import numpy as np

from shm.cuda_driver import CudaDriver

_BATCHES = 5
_OWN_STREAM = 1  # CU_STREAM_NON_BLOCKING
_THREAD_MAY_ALLOCATE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CardError(Exception):
    """Missing GPU, or a GPU command that failed."""


class Card:
    """Card `number` of the driver `library`. Work is enqueued on the default stream."""

    def __init__(self, library: str, number: int) -> None:
        self.driver = CudaDriver(library, number, CardError)
        self._call = self.driver.call
        self.name = self.driver.info().name
        self._events = [self.driver.made("cuEventCreate", 0) for _ in range(2)]

    def allocate(self, num_bytes: int) -> int:
        return self.driver.made("cuMemAlloc_v2", max(num_bytes, 1))

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

    def captured(self, run: Callable[[int], object]) -> Callable[[], None]:
        """Capture a graph of the work that `run` enqueues on the stream that it gets. Return a function that replays the graph
        and waits for it."""
        stream, graph = self.driver.made("cuStreamCreate", _OWN_STREAM), c_void_p()
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_MAY_ALLOCATE)
        try:
            run(stream)
        finally:
            self._call("cuStreamEndCapture", stream, byref(graph))
        executable = self.driver.made("cuGraphInstantiateWithFlags", graph, 0)
        self._call("cuGraphDestroy", graph)

        def replay() -> None:
            self._call("cuGraphLaunch", executable, stream)
            self._call("cuStreamSynchronize", stream)

        return replay
