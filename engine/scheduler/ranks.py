"""Which ranks take steps, and which weights each of them holds.

Used by the scheduler process alone. A rank is there from its Hello on, which it sends when it has joined the broadcast ring,
until the actor table shows a newer epoch of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import Hello


@dataclass(slots=True)
class Rank:
    """A rank: its incarnation, the weights that it holds and those that it should hold."""

    path: str
    version: int
    epoch: int = 0
    is_there: bool = False
    expected_path: str = ""
    expected_version: int = 0


class Ranks:
    """All ranks of the engine."""

    def __init__(self, num_ranks: int, weight_path: str, weight_version: int) -> None:
        self._ranks = [Rank("", 0, expected_path=weight_path, expected_version=weight_version) for _ in range(num_ranks)]

    @property
    def all(self) -> range:
        return range(len(self._ranks))

    @property
    def are_complete(self) -> bool:
        """Every rank takes steps."""
        return all(rank.is_there for rank in self._ranks)

    @property
    def are_cleared(self) -> bool:
        """No rank holds weights."""
        return all(rank.version == 0 for rank in self._ranks)

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

    def expect(self, indexes: list[int], path: str, version: int) -> None:
        """These ranks (none named: all) should hold these weights from now on."""
        for index in indexes or self.all:
            self._ranks[index].expected_path, self._ranks[index].expected_version = path, version

    def with_wrong_weights(self, is_cleared: bool) -> list[int]:
        """The ranks that hold other weights than they should; none should hold any while they are cleared."""
        return [
            index
            for index, rank in enumerate(self._ranks)
            if rank.is_there and rank.version != (0 if is_cleared else rank.expected_version)
        ]

    def weights_of(self, index: int) -> tuple[str, int]:
        return self._ranks[index].path, self._ranks[index].version

    def expected_of(self, index: int) -> tuple[str, int]:
        return self._ranks[index].expected_path, self._ranks[index].expected_version
