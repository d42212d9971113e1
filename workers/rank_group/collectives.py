"""Collectives that a step needs of the ranks that run it together; a single rank is such a group too."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Ranks that make the same calls in the same order (`Communicator`)."""

    @property
    def place(self) -> int:
        """Place of this rank among them."""

    @property
    def count(self) -> int: ...

    def begin_step(self, step: int, versions: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """[...] -> [count, ...], in the order of the ranks."""

    def broadcast(self, x: np.ndarray, root: int = 0) -> np.ndarray:
        """Return what the rank at place `root` has."""


class OneRank:
    """Collectives of a rank without peers."""

    place, count = 0, 1

    def begin_step(self, step: int, versions: int = 0) -> None:
        """Nothing to agree on."""

    def barrier(self) -> None:
        """Nothing to wait for."""

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return x[np.newaxis]

    def broadcast(self, x: np.ndarray, root: int = 0) -> np.ndarray:
        return x
