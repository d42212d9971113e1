"""Host memory from which a card copies, and to which it copies, while the host goes on.

Used by `paddle.py`. It is memory of this process, registered with the driver (page-locked), never memory that Paddle pins: any
op that reads a tensor of Paddle's pinned place moves it to the card, and arrays of its address then point nowhere.
"""

from __future__ import annotations

import logging
import mmap

import numpy as np

from shm.cuda_driver import CudaDriver
from workers.devices.capabilities import DeviceError

_LOG = logging.getLogger(__name__)


class HostMemory:
    """Memory for copies of card `card`, by the driver `library`; "": not registered, and the device's copies may wait."""

    def __init__(self, library: str, card: int) -> None:
        self._driver: CudaDriver | None = None
        self._given: list[np.ndarray] = []  # a copy may be in flight to one that nothing else holds
        if library:
            try:
                self._driver = CudaDriver(library, card, DeviceError)
            except DeviceError as error:
                self._give_up(error)

    def array(self, num_values: int, dtype: np.dtype) -> np.ndarray:
        """Return a zeroed array [num_values] at the start of a page, never freed."""
        num_bytes = -(-max(num_values * dtype.itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        array = np.frombuffer(mmap.mmap(-1, num_bytes), dtype, num_values)
        if self._driver is not None:
            try:
                self._driver.register(array.ctypes.data, num_bytes)
            except DeviceError as error:
                self._give_up(error)
        self._given.append(array)
        return array

    def _give_up(self, error: DeviceError) -> None:
        self._driver = None
        _LOG.warning("copies between host and card wait for each other, because host memory cannot be registered: %s", error)
