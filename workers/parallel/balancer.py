"""Moves experts between the ranks that share them, by what is counted of their rows.

Called by the worker between steps. The lowest member leads: now and then it looks at the counts of all (no collective),
computes a placement in a thread, and proposes it. Every rank faults in the weights of the experts that it gets and says that it
is ready; then the leader puts the version in force two steps ahead of the clock: nobody can come to that step before the leader
has run the one before it, so everybody sees the word in time. Whatever breaks the gang meanwhile leaves the old version in
force, or the new one, for all alike (`balance_board.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from engine.config import EplbConfig
from engine.parallel.eplb import Topology, imbalance, num_moved, rebalanced
from engine.parallel.placement import LayerPlacement
from ops.modules import Experts
from workers.parallel.balance_board import BalanceBoard, InForce, next_version
from workers.parallel.experts import ExpertRank

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class _Look:
    """What the leader saw."""

    at_s: float
    num_steps: int  # of the gang, that it has run
    counts: np.ndarray  # [layers, experts], of all ranks, in all


class Balancer:
    """Of one rank. `mixtures`: of the weights in use, by layer. `on_change(moved, imbalance)` is called on the leader when it
    puts a version in force."""

    def __init__(
        self,
        experts: ExpertRank,
        board: BalanceBoard,
        config: EplbConfig,
        topology: Topology,
        mixtures: Callable[[], Sequence[Experts]],
        on_change: Callable[[int, float], None],
    ) -> None:
        self._experts = experts
        self._board = board
        self._config = config
        self._topology = topology
        self._mixtures = mixtures
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, "eplb")
        self._looks: deque[_Look] = deque()
        self._epoch = 0
        self._num_steps = 0
        self._last_change = 0  # in steps
        self._found: Future[tuple[LayerPlacement, ...] | None] | None = None
        self._faulted: tuple[int, Future[None]] | None = None  # for which version
        self._proposal: tuple[int, int, float] | None = None  # version, experts that move, what max/mean becomes

    def join(self) -> None:
        """Another epoch: what was proposed in the one before is void. Experts lie as was in force last."""
        if self._epoch == self._experts.epoch:
            return
        self._epoch = self._experts.epoch
        self._found = self._faulted = self._proposal = None
        self._take(self._board.seal(self._experts.epoch))

    def begin_step(self, number: int) -> None:
        """Before step `number` of the gang."""
        self._num_steps += 1
        found = self._board.in_force
        if found.epoch == self._experts.epoch and number >= found.number:
            self._take(found)

    def advance(self, now_s: float) -> None:
        """Between two steps, or while there are none."""
        epoch, members = self._experts.epoch, self._experts.communicator.members
        self._get_ready(epoch)
        if members and members[0] == self._experts.communicator.rank:
            self._lead(epoch, now_s)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    # ------------------------------------------------------------------------------------------------------- everybody

    def _take(self, found: InForce) -> None:
        if found.version != self._experts.version:
            self._experts.place(self._board.placement(found.version), found.version)

    def _get_ready(self, epoch: int) -> None:
        """Fault in what a proposal brings to this rank. Who has not come to the version before is not ready for the next."""
        version = self._board.proposed(epoch)
        if version is None or version != next_version(self._experts.version):
            return
        if self._faulted is None or self._faulted[0] != version:
            self._faulted = version, self._thread.submit(self._fault_in, self._board.placement(version))
        elif self._faulted[1].done():
            self._faulted[1].result()
            self._board.say_ready(epoch, version)

    def _fault_in(self, after: tuple[LayerPlacement, ...]) -> None:
        rank = self._experts.communicator.rank
        for mixture, old, new in zip(self._mixtures(), self._experts.placement, after, strict=True):
            for expert in set(new[rank]) - set(old[rank]):
                for array in mixture.weight.arrays():
                    rows = array.numpy().view(np.uint8).reshape(mixture.num_experts, -1)
                    rows[expert, ::_PAGE].max(initial=0)

    # ------------------------------------------------------------------------------------------------------ the leader

    def _lead(self, epoch: int, now_s: float) -> None:
        if self._board.in_force.version != self._experts.version:
            return  # the last one's step has not come yet
        if self._proposal is not None:
            self._put_in_force(epoch, self._proposal)
        elif self._found is not None:
            if self._found.done():
                found, self._found = self._found.result(), None
                self._propose(epoch, found)
        elif not self._looks or now_s - self._looks[-1].at_s >= self._config.check_interval_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        config, looks = self._config, self._looks
        if looks and looks[-1].num_steps == self._num_steps:
            return  # nothing ran
        looks.append(_Look(now_s, self._num_steps, self._board.counts.sum(axis=0)))
        while len(looks) > 2 and (
            now_s - looks[0].at_s > config.statistics_interval_s or self._num_steps - looks[0].num_steps > config.window_size
        ):
            looks.popleft()
        if len(looks) > 1 and self._num_steps - self._last_change >= config.step_interval:
            self._found = self._thread.submit(
                rebalanced, self._experts.placement, self._counts(), self._topology, config.min_gain
            )

    def _counts(self) -> list[list[int]]:
        """Of the time that is looked back at."""
        found: list[list[int]] = (self._looks[-1].counts - self._looks[0].counts).tolist()
        return found

    def _propose(self, epoch: int, found: tuple[LayerPlacement, ...] | None) -> None:
        self._last_change = self._num_steps
        if found is None:
            return
        after = [imbalance(*layer) for layer in zip(found, self._counts(), strict=True)]
        version = next_version(self._experts.version)
        self._board.propose(epoch, version, found)
        self._proposal = version, num_moved(self._experts.placement, found), sum(after) / len(after)

    def _put_in_force(self, epoch: int, proposal: tuple[int, int, float]) -> None:
        """Once all are ready. What somebody sealed meanwhile stays, and the epoch that follows begins without a proposal."""
        version, num_experts, ratio = proposal
        before = self._board.in_force
        members = self._experts.communicator.members
        if before.epoch != epoch or not all(self._board.is_ready(rank, epoch, version) for rank in members):
            return
        header = self._experts.communicator.header
        number = header.num_begun(header.clock, epoch) + 2
        if self._board.replace(before, InForce.of(epoch, number, version)):
            self._on_change(num_experts, ratio)
        self._proposal = None
