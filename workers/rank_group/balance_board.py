"""Words by which ranks agree on the places of shared experts, in the segment `experts.main` (`shm/experts.py`).

The word in force changes by compare-and-exchange alone: by the leader, who puts a version in force, or by the first rank that
joins a new epoch, which seals the version that was in force. So a death decides between the old placement and the new one for
all alike. The words `proposed` and `ready` are epoch << 12 | version.
"""

from __future__ import annotations

import numpy as np

from engine.parallel.placement import LayerPlacement, owners, placement_of
from shm import _native
from shm.experts import IN_FORCE, MAX_VERSION, PROPOSED, VERSION_BITS, ExpertTable, InForce
from shm.layout import LINE


def next_version(version: int) -> int:
    """Versions of neighbours in time have different parities; 0 is the first placement's alone."""
    return version % (MAX_VERSION - 1) + 1 if version % 2 else version + 1


class BalanceBoard:
    """The board as rank `rank` sees it. `counts`: uint64 [ranks, layers, experts]; each rank writes its own."""

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
        """Return the words in force and proposed: while these stay, nothing is new."""
        return _native.load_u64(self._table.words, IN_FORCE), _native.load_u64(self._table.words, PROPOSED)

    def replace(self, before: InForce, after: InForce) -> bool:
        """False: it is not `before` any more."""
        return _native.compare_exchange_u64(self._table.words, IN_FORCE, before.word, after.word)

    def seal(self, epoch: int) -> InForce:
        """Return what is in force in `epoch` from its beginning on: the last version of the epochs before."""
        while (found := self.in_force).epoch < epoch:
            self.replace(found, InForce.of(epoch, 0, found.version))
        return found

    def proposed(self, epoch: int) -> int | None:
        """The version that is proposed in this epoch."""
        word = _native.load_u64(self._table.words, PROPOSED)
        return word & MAX_VERSION if word >> VERSION_BITS == epoch else None

    def propose(self, epoch: int, version: int, placement: tuple[LayerPlacement, ...]) -> None:
        for table, layer in zip(self._tables[version % 2], placement, strict=True):
            table[...] = owners(layer, len(table))
        _native.store_u64(self._table.words, PROPOSED, epoch << VERSION_BITS | version)

    def placement(self, version: int) -> tuple[LayerPlacement, ...]:
        """Return the placement that was proposed under this version."""
        return tuple(placement_of(table) for table in self._tables[version % 2])

    def show_window(self, since_s: float, counts: np.ndarray) -> None:
        """Show the counts of all ranks at the beginning of the window."""
        self._table.show_window(int(since_s * 1e9), counts.tobytes())

    def say_ready(self, epoch: int, version: int) -> None:
        _native.store_u64(self._table.words, LINE * (1 + self._rank), epoch << VERSION_BITS | version)

    def is_ready(self, rank: int, epoch: int, version: int) -> bool:
        return _native.load_u64(self._table.words, LINE * (1 + rank)) == epoch << VERSION_BITS | version
