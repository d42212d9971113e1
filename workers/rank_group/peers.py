"""The ranks that a rank computes with, and its share of the model. Made by the worker and by tests, used by the runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.process.nodes import seat_of
from ops.modules import Experts
from workers.rank_group.collectives import Collectives, OneRank
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank
from workers.rank_group.rendezvous import Rendezvous
from workers.rank_group.share import TensorShare


class Peers:
    """Ranks that rank `rank` computes with; `epoch` is that of its process.

    With a `communicator` a rank computes its share of a model, and each step runs on all ranks of the group. RankGroupBroken in
    a step means that a rank died, and the step must run again on all. With `experts` all ranks of the rank group run each step
    together, with rows or without.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        communicator: Communicator | None = None,
        experts: ExpertRank | None = None,
        epoch: int = 1,
    ) -> None:
        self.rank, self.experts = rank, experts
        self.owners: Any = None if experts is None else experts.owners  # replaced by a device that has a copy
        self.communicator = communicator if communicator is not None and communicator.count > 1 else None
        self.ranks: Collectives = self.communicator or OneRank()  # ranks with the same rows
        self.share = TensorShare()
        if communicator is not None:
            self.share = TensorShare(communicator.place, communicator.count, shares_experts=experts is not None)
        is_native = config.ops == "native"
        self.rank_group = (
            communicator.rank_group(experts.rank_group if experts else None) if communicator and is_native else None
        )
        self.meetings = Rendezvous.of(config, rank, self.communicator, experts.communicator if experts else None, epoch)
        self.seat = seat_of(rank, config.num_ranks, config.memory_nodes or [()])

    @property
    def are_none(self) -> bool:
        """Return whether the rank runs its steps alone."""
        return self.ranks.count == 1 and self.experts is None

    @property
    def share_experts(self) -> bool:
        return self.experts is not None

    def bind(self, mixtures: list[Experts]) -> None:
        """Let the experts of the sparse layers be computed where the rank group places them."""
        if self.experts is None:
            return
        for layer, mixture in enumerate(mixtures):
            mixture.owners = self.owners[layer]
            mixture.counts = None if self.experts.counts is None else self.experts.counts[layer]

    def gather_values(self, values: np.ndarray) -> np.ndarray:
        """Return the `values` (int64 [n]) of each member of the rank group: [members, n]."""
        communicator = self.communicator if self.experts is None else self.experts.communicator
        if communicator is None:
            return values[np.newaxis]
        return communicator.all_gather(values)[list(communicator.places)]
