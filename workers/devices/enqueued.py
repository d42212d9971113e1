"""Work enqueued on a device, and captured work."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np


class Traffic(msgspec.Struct):
    """Traffic between a device and the host since the rank began."""

    num_to_device: int = 0  # copies
    num_to_host: int = 0
    waited_ns: int = 0  # for results of the device


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it again, on the present contents of the same addresses."""


class Fetch(Protocol):
    """Copy to the host in flight."""

    def wait(self) -> np.ndarray:
        """Wait for the values, which are valid until the next fetch of the same `key`."""


class Fetched:
    """Values that are available already."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def wait(self) -> np.ndarray:
        return self._values
