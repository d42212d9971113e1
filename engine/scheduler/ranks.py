"""Ranks that are ready for steps, and the weights that each holds; the weights that they should hold are in the run's record.

Used by the scheduler process alone. A rank is present from its Hello, sent when it has joined the broadcast ring, until the
actor table shows a newer epoch of it. Ranks that exchange tensors say hello again with each epoch of their rank group.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from engine.messages import Hello, WeightsState
from engine.process.run_directory import WeightsRecord


class Rank(msgspec.Struct):
    """A rank: its incarnation, and the weights that it holds (version 0: none)."""

    path: str = ""
    version: int = 0
    contents: str = ""
    epoch: int = 0
    is_there: bool = False
    rank_group_epoch: int = 0  # the epoch it joined last
    arena_id: int | None = None  # identifies the memory of its KV cache; None: not known yet
    has_lost_cache: bool = False  # it has other memory than in its previous life


class Ranks:
    """All ranks of the replica, by tensor rank."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [Rank() for _ in range(num_ranks)]

    @property
    def all(self) -> range:
        return range(len(self._ranks))

    @property
    def are_complete(self) -> bool:
        """Whether all ranks are present and in the same epoch of their rank group."""
        return all(rank.is_there and rank.rank_group_epoch == self.rank_group_epoch for rank in self._ranks)

    @property
    def rank_group_epoch(self) -> int:
        """Epoch of all ranks, once they are complete."""
        return self._ranks[0].rank_group_epoch

    def said_hello(self, index: int, hello: Hello) -> bool:
        """Register a rank's hello. Return False if the rank was already present."""
        rank = self._ranks[index]
        if hello.epoch < rank.epoch or (hello.epoch == rank.epoch and rank.is_there):
            return False
        rank.epoch, rank.is_there = hello.epoch, True
        rank.path, rank.version, rank.contents = hello.weight_path, hello.weight_version, hello.weight_contents
        rank.has_lost_cache = rank.arena_id not in (None, hello.arena_id)
        rank.arena_id = hello.arena_id
        return True

    def has_lost_cache(self, index: int) -> bool:
        """Return whether the rank that said hello last has other memory for its KV cache than before."""
        return self._ranks[index].has_lost_cache

    def joined(self, index: int, hello: Hello) -> bool:
        """Register the epoch of the rank group that a rank reports. Return False if it was already known."""
        rank = self._ranks[index]
        is_news = hello.epoch == rank.epoch and hello.rank_group_epoch != rank.rank_group_epoch
        if is_news:
            rank.rank_group_epoch = hello.rank_group_epoch
        return is_news

    def restarted(self, index: int, epoch: int) -> None:
        """Note a new epoch of a rank in the actor table; its Hello may have come already."""
        if epoch > self._ranks[index].epoch:
            self._ranks[index].epoch = epoch
            self._ranks[index].is_there = False

    def changed(self, index: int, path: str, version: int, contents: str = "") -> None:
        """Note that a rank holds other weights now."""
        rank = self._ranks[index]
        rank.path, rank.version, rank.contents = path, version, contents

    def have_wrong_weights(self, record: WeightsRecord) -> bool:
        """Whether a rank holds other weights than the record says, or any although the record says none."""
        is_cleared = record.state is WeightsState.CLEARED
        return any(
            rank.version != (0 if is_cleared else version) or rank.contents != record.contents.get(rank.version, "")
            for rank, (_, version) in zip(self._ranks, record.ranks, strict=True)
        )

    def with_contents(self, record: WeightsRecord) -> WeightsRecord:
        """Return the record with the ranks' contents under the versions that lack them. Versions that no rank can return to are
        dropped."""
        found = {rank.version: rank.contents for rank in reversed(self._ranks) if rank.contents}
        numbers = sorted({version for _, version in record.ranks} & (found.keys() | record.contents.keys()))
        return replace(record, contents={version: record.contents.get(version) or found[version] for version in numbers})

    def overwritten(self, record: WeightsRecord) -> str:
        """Return the path of a checkpoint that a rank loaded under the right version, but with other contents; empty: none."""
        for rank, weights in zip(self._ranks, record.ranks, strict=True):
            is_its = (rank.path, rank.version) == weights
            if is_its and rank.contents != record.contents.get(rank.version, rank.contents):
                return rank.path
        return ""

    def weights_of(self, index: int) -> tuple[str, int]:
        return self._ranks[index].path, self._ranks[index].version
