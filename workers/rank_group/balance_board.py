"""Words by which ranks agree on the placement of shared experts, in the segment `experts.main` (`shm/experts.py`).

The word in force changes only by compare-and-exchange: by the leader, who puts a version in force, or by the first rank that
joins a new epoch, which seals the version in force. So after a death all ranks have either the old placement or the new one.
The words `proposed` and `ready` are epoch << 12 | version.
"""

from __future__ import annotations

import numpy as np

from engine.parallel.placement import LayerPlacement, owners, placement_of
from shm import _native
from shm.experts import IN_FORCE, MAX_VERSION, PROPOSED, VERSION_BITS, ExpertTable, InForce
from shm.layout import LINE


def next_version(version: int) -> int:
    """Return the next version. Consecutive versions have different parities; only the first placement is 0."""
    return version % (MAX_VERSION - 1) + 1 if version % 2 else version + 1


class BalanceBoard:
    """The board as seen by rank `rank`. `counts`: uint64 [ranks, layers, experts]; each rank writes its own."""

    def __init__(self, table: ExpertTable, rank: int) -> None:
        self._table, self._rank = table, rank
        shape = len(table.layers), table.num_experts
        self.counts = np.frombuffer(table.counts, np.uint64).reshape(table.num_ranks, *shape)
        self._tables = np.frombuffer(table.placements, np.int32).reshape(2, *shape, 1 + table.num_ranks)

    @property
    def in_force(self) -> InForce:
        return self._table.in_force

    @property
    def words(self) -> tuple[int, int]:
        """Return the words in force and proposed, to detect a change."""
        return _native.load_u64(self._table.words, IN_FORCE), _native.load_u64(self._table.words, PROPOSED)

    def replace(self, before: InForce, after: InForce) -> bool:
        """Replace the word in force; return False if it is no longer `before`."""
        return _native.compare_exchange_u64(self._table.words, IN_FORCE, before.word, after.word)

    def seal(self, epoch: int) -> InForce:
        """Return the placement in force from the beginning of `epoch` on: the last version of the epochs before."""
        while (found := self.in_force).epoch < epoch:
            self.replace(found, InForce.of(epoch, 0, found.version))
        return found

    def proposed(self, epoch: int) -> int | None:
        """Return the version proposed in this epoch, or None."""
        word = _native.load_u64(self._table.words, PROPOSED)
        return word & MAX_VERSION if word >> VERSION_BITS == epoch else None

    def propose(self, epoch: int, version: int, placement: tuple[LayerPlacement, ...]) -> None:
        for table, layer in zip(self._tables[version % 2], placement, strict=True):
            table[...] = owners(layer, len(table))
        _native.store_u64(self._table.words, PROPOSED, epoch << VERSION_BITS | version)

    def placement(self, version: int) -> tuple[LayerPlacement, ...]:
        """Return the placement proposed under this version."""
        return tuple(placement_of(table) for table in self._tables[version % 2])

    def show_window(self, since_s: float, counts: np.ndarray) -> None:
        """Publish the counts of all ranks at the beginning of the window."""
        self._table.show_window(int(since_s * 1e9), counts.tobytes())

    def say_ready(self, epoch: int, version: int) -> None:
        _native.store_u64(self._table.words, LINE * (1 + self._rank), epoch << VERSION_BITS | version)

    def is_ready(self, rank: int, epoch: int, version: int) -> bool:
        return _native.load_u64(self._table.words, LINE * (1 + rank)) == epoch << VERSION_BITS | version
