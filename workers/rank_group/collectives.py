"""Collectives that a step needs from the ranks that run it together; a single rank is a group too."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Ranks that make the same calls in the same order (`Communicator`)."""

    @property
    def place(self) -> int:
        """Return the index of this rank among them."""

    @property
    def count(self) -> int: ...

    def begin_step(self, step: int, versions: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """[...] -> [count, ...], in rank order."""

    def broadcast(self, x: np.ndarray, root: int = 0) -> np.ndarray:
        """Return the value of the rank at place `root`."""


class OneRank:
    """Collectives of a single rank."""

    place, count = 0, 1

    def begin_step(self, step: int, versions: int = 0) -> None:
        """Do nothing: there are no peers."""

    def barrier(self) -> None:
        """Do nothing: there are no peers."""

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return x[np.newaxis]

    def broadcast(self, x: np.ndarray, root: int = 0) -> np.ndarray:
        return x
