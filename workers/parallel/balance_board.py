"""What ranks that share experts tell each other of where these lie, at the end of the comm arena.

    line            lines of each rank       u64                          int32, twice
    +-------------+------------------------+----------------------------+----------------------------------------+
    | proposed    | ready                  | counts [ranks, layers,     | placements [layers, experts, 1 + ranks]|
    | in force    |                        |         experts]           | of even and of odd versions            |
    +-------------+------------------------+----------------------------+----------------------------------------+

`in force` is one word: epoch << 44 | number << 12 | version. From step `number` of that epoch on experts lie as the placement
of `version` says. It changes by compare-and-exchange alone: by the leader, who puts a version in force, or by the first rank
that joins a new epoch, which seals what was in force. So a death decides between the old placement and the new one for all
alike.
`proposed` and `ready` are epoch << 12 | version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.checkpoint.comm_spec import balance_bytes
from engine.checkpoint.model_config import ModelConfig
from engine.parallel.placement import LayerPlacement, owners
from shm import _native
from shm.gang import LINE

MAX_VERSION = (1 << 12) - 1  # versions begin anew after it
_PROPOSED, _IN_FORCE = 0, 8
_NUMBER_BITS, _VERSION_BITS = 32, 12


@dataclass(frozen=True, slots=True)
class InForce:
    """From step `number` of `epoch` on."""

    word: int

    @staticmethod
    def of(epoch: int, number: int, version: int) -> InForce:
        return InForce(epoch << _NUMBER_BITS + _VERSION_BITS | number << _VERSION_BITS | version)

    @property
    def epoch(self) -> int:
        return self.word >> _NUMBER_BITS + _VERSION_BITS

    @property
    def number(self) -> int:
        return self.word >> _VERSION_BITS & (1 << _NUMBER_BITS) - 1

    @property
    def version(self) -> int:
        return self.word & MAX_VERSION


def next_version(version: int) -> int:
    """Versions of neighbours in time have different parities; 0 is the first placement's alone."""
    return version % (MAX_VERSION - 1) + 1 if version % 2 else version + 1


class BalanceBoard:
    """Of rank `rank`. `counts`: uint64 [ranks, layers, experts]; each rank writes its own."""

    def __init__(self, arena: np.ndarray, model: ModelConfig, num_ranks: int, rank: int) -> None:
        assert model.experts is not None, "a model without experts has none to move"
        area = arena[len(arena) - balance_bytes(model, num_ranks) :]
        self._memory, self._rank = area.data, rank
        shape = len(model.experts.sparse_layers), model.experts.num_experts
        begin, num_counts = LINE * (1 + num_ranks), num_ranks * shape[0] * shape[1]
        self.counts = area[begin : begin + 8 * num_counts].view(np.uint64).reshape(num_ranks, *shape)
        begin += 8 * num_counts
        num_owners = shape[0] * shape[1] * (1 + num_ranks)
        self._tables = area[begin : begin + 8 * num_owners].view(np.int32).reshape(2, *shape, 1 + num_ranks)

    @property
    def in_force(self) -> InForce:
        return InForce(_native.load_u64(self._memory, _IN_FORCE))

    def replace(self, before: InForce, after: InForce) -> bool:
        """False: it is not `before` any more."""
        return _native.compare_exchange_u64(self._memory, _IN_FORCE, before.word, after.word)

    def seal(self, epoch: int) -> InForce:
        """What is in force in `epoch` from its beginning on: what was last in the epochs before."""
        while (found := self.in_force).epoch < epoch:
            self.replace(found, InForce.of(epoch, 0, found.version))
        return found

    def proposed(self, epoch: int) -> int | None:
        """The version that is proposed in this epoch."""
        word = _native.load_u64(self._memory, _PROPOSED)
        return word & MAX_VERSION if word >> _VERSION_BITS == epoch else None

    def propose(self, epoch: int, version: int, placement: tuple[LayerPlacement, ...]) -> None:
        for table, layer in zip(self._tables[version % 2], placement, strict=True):
            table[...] = owners(layer, len(table))
        _native.store_u64(self._memory, _PROPOSED, epoch << _VERSION_BITS | version)

    def placement(self, version: int) -> tuple[LayerPlacement, ...]:
        """That was proposed under this version."""
        return tuple(_layer_of(table) for table in self._tables[version % 2])

    def say_ready(self, epoch: int, version: int) -> None:
        _native.store_u64(self._memory, LINE * (1 + self._rank), epoch << _VERSION_BITS | version)

    def is_ready(self, rank: int, epoch: int, version: int) -> bool:
        return _native.load_u64(self._memory, LINE * (1 + rank)) == epoch << _VERSION_BITS | version


def _layer_of(table: np.ndarray) -> LayerPlacement:
    """The placement of which `table` are the owners."""
    ranks: list[list[int]] = [[] for _ in range(table.shape[1] - 1)]
    for expert, (count, *having) in enumerate(table.tolist()):
        for rank in having[:count]:
            ranks[rank].append(expert)
    return tuple(tuple(experts) for experts in ranks)
