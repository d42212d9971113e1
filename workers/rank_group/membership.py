"""This rank's membership: a single rank, one of a replica's tensor ranks, or one of all ranks that share experts.

Made by the worker actor when it starts. A rank group is a replica, or all replicas if they share experts; its epoch and members
are in the comm arena that the supervisor made.
"""

from __future__ import annotations

import os

from engine.checkpoint.model_config import ModelConfig
from engine.parallel.eplb import Topology
from engine.process.context import ActorContext
from engine.process.nodes import seat_of
from shm.experts import ExpertTable
from shm.segment import MemoryFile
from workers.rank_group.balance_board import BalanceBoard
from workers.rank_group.communicator import SPIN_NS, Communicator
from workers.rank_group.experts import ExpertRank

_HANG_GRACE_S = 10.0  # a hung peer is ended before the ranks that wait for it time out


class SingleRank:
    """A rank that computes alone, always in epoch 0."""

    epoch = 0
    has_new_epoch = False
    communicator: Communicator | None = None
    communicators: tuple[Communicator, ...] = ()
    experts: ExpertRank | None = None

    def join(self) -> bool:
        return True


class RankGroupMember:
    """Rank that shares a model, its experts, or both. `communicator` reaches the ranks of its replica."""

    def __init__(self, context: ActorContext, arena: MemoryFile, model: ModelConfig) -> None:
        config = context.config
        self._context = context
        self._arena = arena
        self._rank = context.index if config.enable_expert_parallel else context.tensor_rank
        self.communicator = self._reach(self._rank - context.tensor_rank, config.tensor_parallel_size)
        self.communicators: tuple[Communicator, ...] = (self.communicator,)
        self.experts: ExpertRank | None = None
        if config.enable_expert_parallel:
            self.experts = ExpertRank(self._reach(0, config.num_ranks, shares_experts=True), config, model)
            self.communicators += (self.experts.communicator,)
            self.board = BalanceBoard(ExpertTable.attach(context.run.run_id), context.index)
            self.experts.counts = self.board.counts[context.index]

    @property
    def epoch(self) -> int:
        """Return the epoch of the last join."""
        return self.communicator.epoch

    @property
    def has_new_epoch(self) -> bool:
        return self.communicator.is_elsewhere

    def join(self) -> bool:
        """Join the rank group's present epoch; return whether this rank is a member in it."""
        return self.communicator.join()

    def topology(self, model: ModelConfig) -> Topology | None:
        """Return the ranks and slots that experts may move between; None if experts do not move."""
        config = self._context.config
        if self.experts is None or not config.enable_eplb or model.experts is None:
            return None
        return Topology(config.num_ranks, self.experts.num_slots, num_groups=model.experts.num_groups)

    def _reach(self, first: int, count: int, *, shares_experts: bool = False) -> Communicator:
        """Return the communicator of the `count` ranks from `first` on."""
        config = self._context.config
        num_beside = seat_of(self._context.index, config.num_ranks, config.memory_nodes or [()]).count
        has_own_cores = num_beside * config.threads <= len(os.sched_getaffinity(0))
        return Communicator(
            self._arena.buffer,
            self._rank,
            first,
            count,
            timeout_s=config.hang_timeout_s + _HANG_GRACE_S,
            spin_ns=SPIN_NS if has_own_cores else 0,
            shares_experts=shares_experts,
            needs_all=config.are_rank_groups_whole,
        )


def make_membership(context: ActorContext, model: ModelConfig) -> SingleRank | RankGroupMember:
    arena = context.comm_arena()
    return SingleRank() if arena is None else RankGroupMember(context, arena, model)
