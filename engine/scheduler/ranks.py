"""Which ranks take steps, and which weights each of them holds; what they should hold is in the run's record.

Used by the scheduler process alone. A rank is there from its Hello on, which it sends when it has joined the broadcast ring,
until the actor table shows a newer epoch of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import Hello, WeightsState
from engine.process.run_directory import WeightsRecord


@dataclass(slots=True)
class Rank:
    """A rank: its incarnation, and the weights that it holds (version 0: none)."""

    path: str = ""
    version: int = 0
    epoch: int = 0
    is_there: bool = False


class Ranks:
    """All ranks of the engine."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [Rank() for _ in range(num_ranks)]

    @property
    def all(self) -> range:
        return range(len(self._ranks))

    @property
    def are_complete(self) -> bool:
        """Every rank takes steps."""
        return all(rank.is_there for rank in self._ranks)

    def greet(self, index: int, hello: Hello) -> bool:
        """A rank says that it is there. False where that is no news."""
        rank = self._ranks[index]
        if hello.epoch < rank.epoch or (hello.epoch == rank.epoch and rank.is_there):
            return False
        rank.epoch, rank.is_there = hello.epoch, True
        rank.path, rank.version = hello.weight_path, hello.weight_version
        return True

    def restarted(self, index: int, epoch: int) -> None:
        """The actor table shows a new epoch, whose Hello may have come already."""
        if epoch > self._ranks[index].epoch:
            self._ranks[index].epoch = epoch
            self._ranks[index].is_there = False

    def changed(self, index: int, path: str, version: int) -> None:
        """A rank holds other weights now."""
        self._ranks[index].path, self._ranks[index].version = path, version

    def have_wrong_weights(self, record: WeightsRecord) -> bool:
        """Some rank holds other weights than the record says, or any where that says none."""
        is_cleared = record.state is WeightsState.CLEARED
        return any(
            rank.version != (0 if is_cleared else version) for rank, (_, version) in zip(self._ranks, record.ranks, strict=True)
        )

    def weights_of(self, index: int) -> tuple[str, int]:
        return self._ranks[index].path, self._ranks[index].version
