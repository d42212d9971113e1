"""Work that a device was given, or may be given again."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np


class Traffic(msgspec.Struct):
    """Between a device and the host, since the rank began."""

    num_to_device: int = 0  # copies
    num_to_host: int = 0
    waited_ns: int = 0  # for the device, where its results are fetched


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Enqueue it again, on what lies at the same addresses now."""


class Fetch(Protocol):
    """A copy to the host under way."""

    def wait(self) -> np.ndarray:
        """The values, until the next fetch of the same `key`."""


class Fetched:
    """Values that are there already."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def wait(self) -> np.ndarray:
        return self._values
