"""Moves experts between the ranks that share them, by what is counted of their rows.

Called by the worker between steps. The lowest member leads: now and then it looks at the counts of all (no collective),
computes a placement in a thread, and proposes it. Every rank faults in the weights of the experts that it gets and says that it
is ready; then the leader puts the version in force two steps ahead of the clock: nobody can come to that step before the leader
has run the one before it, so everybody sees the word in time. Whatever breaks the rank group meanwhile leaves the old version
in force, or the new one, for all alike (`balance_board.py`).

An operator's order goes the same way at once, on the rank that leads. Where nobody has rows the leader begins steps without
any, until the version's step has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from engine.config import EplbConfig
from engine.messages import Details, Reply
from engine.parallel.eplb import Topology, forced, imbalance, num_moved, rebalanced
from engine.parallel.placement import LayerPlacement
from ops.modules import Experts
from shm.experts import InForce
from workers.rank_group.balance_board import BalanceBoard, next_version
from workers.rank_group.experts import ExpertRank

_PAGE = 4096


class _Look(msgspec.Struct, frozen=True):
    """Counts that the leader saw at one time."""

    at_s: float
    num_steps: int  # of the rank group, that it has run
    counts: np.ndarray  # [layers, experts], of all ranks, in all


class _Order(msgspec.Struct):
    """An operator's command."""

    command_id: str
    is_forced: bool
    is_begun: bool = False  # what is looked for, or proposed, is for it
    version: int | None = None  # that it put in force
    details: Details = {}


class Balancer:
    """Balances the experts of one rank. `mixtures`: of the weights in use, by layer. `on_change(moved, imbalance)` is called on
    the leader when it puts a version in force, `answer` when a command is done."""

    def __init__(
        self,
        experts: ExpertRank,
        board: BalanceBoard,
        config: EplbConfig,
        topology: Topology,
        mixtures: Callable[[], Sequence[Experts]],
        on_change: Callable[[int, float], None],
        answer: Callable[[Reply], None],
    ) -> None:
        self._experts = experts
        self._board = board
        self._config = config
        self._topology = topology
        self._mixtures = mixtures
        self._on_change = on_change
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, "eplb")
        self._looks: deque[_Look] = deque()
        self._epoch = 0
        self._num_steps = 0
        self._last_change = 0  # in steps
        self._found: Future[tuple[LayerPlacement, ...] | None] | None = None
        self._faulted: tuple[int, Future[None]] | None = None  # for which version
        self._counted: list[list[int]] = []  # what is looked for goes by this
        self._proposal: tuple[int, int, float] | None = None  # version, experts that move, what max/mean becomes
        self._order: _Order | None = None
        self._settled: tuple[int, int] | None = None  # the board's words when there was nothing to do

    def join(self) -> None:
        """Another epoch: what was proposed in the one before is void. Experts lie as was in force last."""
        if self._epoch == self._experts.epoch:
            return
        self._epoch = self._experts.epoch
        self._settled = None
        self._found = self._faulted = self._proposal = None
        self._take(self._board.seal(self._experts.epoch))
        if self._order is not None:
            self._order.is_begun = False  # it begins anew, unless its version is in force

    def order(self, command_id: str, *, is_forced: bool) -> None:
        """Move experts now, and answer that."""
        self._order = _Order(command_id, is_forced)
        self._settled = None

    @property
    def wants_step(self) -> bool:
        """An order waits for its version's step, and nobody may have rows for one."""
        return self._order is not None and self._board.in_force.version != self._experts.version

    @property
    def is_settled(self) -> bool:
        """There is nothing to do until a step runs, or somebody says something."""
        return self._settled is not None and self._settled == self._board.words

    def begin_step(self, number: int) -> None:
        """Before step `number` of the rank group."""
        self._num_steps += 1
        self._settled = None
        found = self._board.in_force
        if found.epoch == self._experts.epoch and number >= found.number:
            self._take(found)

    def advance(self, now_s: float) -> None:
        """Between two steps, or while there are none."""
        if self.is_settled:
            return
        words = self._board.words
        epoch, members = self._experts.epoch, self._experts.communicator.members
        if self._experts.communicator.rank in members:
            self._get_ready(epoch)
        order = self._order
        if order is not None and order.version == self._experts.version:
            self._end_order(200, f"moved {order.details['num_moved']} experts", order.details)
        if members and members[0] == self._experts.communicator.rank:
            self._lead(epoch, now_s)
        elif self._order is not None:
            self._end_order(503, f"rank {members[0] if members else 'none'} now leads the rank group; try again")
        is_leader = bool(members) and members[0] == self._experts.communicator.rank
        if not self._is_under_way(epoch) and (not is_leader or self._has_looked):
            self._settled = words

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _is_under_way(self, epoch: int) -> bool:
        """An order, a search or a proposal."""
        is_leading = self._order is not None or self._found is not None or self._proposal is not None
        return is_leading or self._board.proposed(epoch) == next_version(self._experts.version)

    @property
    def _has_looked(self) -> bool:
        """At all that was counted: no step ran since."""
        return bool(self._looks) and self._looks[-1].num_steps == self._num_steps

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
        elif self._order is not None:
            self._carry_out(self._order, now_s)
        elif not self._looks or now_s - self._looks[-1].at_s >= self._config.check_interval_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        config, looks = self._config, self._looks
        if self._note(now_s) and len(looks) > 1 and self._num_steps - self._last_change >= config.step_interval:
            self._search(self._counts())

    def _note(self, now_s: float) -> bool:
        """False: nothing ran since."""
        config, looks = self._config, self._looks
        if self._has_looked:
            return False
        first = looks[0] if looks else None
        looks.append(_Look(now_s, self._num_steps, self._board.counts.sum(axis=0)))
        while len(looks) > 2 and (
            now_s - looks[0].at_s > config.statistics_interval_s or self._num_steps - looks[0].num_steps > config.window_size
        ):
            looks.popleft()
        if looks[0] is not first:
            self._board.show_window(looks[0].at_s, looks[0].counts)
        return True

    def _carry_out(self, order: _Order, now_s: float) -> None:
        """By what was counted of the time that is looked back at; where that is nothing, of all time."""
        self._note(now_s)
        counts = self._counts() if len(self._looks) > 1 else []
        order.is_begun = True
        self._search(counts if any(map(any, counts)) else self._board.counts.sum(axis=0).tolist(), is_forced=order.is_forced)

    def _search(self, counts: list[list[int]], *, is_forced: bool = False) -> None:
        self._counted = counts
        present, topology = self._experts.placement, self._topology
        if is_forced:
            self._found = self._thread.submit(forced, present, counts, topology)
        else:
            self._found = self._thread.submit(rebalanced, present, counts, topology, self._config.min_gain)

    def _counts(self) -> list[list[int]]:
        """Return the counts of the window."""
        found: list[list[int]] = (self._looks[-1].counts - self._looks[0].counts).tolist()
        return found

    def _propose(self, epoch: int, found: tuple[LayerPlacement, ...] | None) -> None:
        self._last_change = self._num_steps
        present = self._experts.placement
        if found is None or found == present:
            if self._order is not None and self._order.is_begun:
                ratio = _mean_imbalance(present, self._counted)
                text = f"no experts moved: max/mean of the ranks' rows is {ratio:.3f}, and moving would not improve it"
                self._end_order(200, text, {"placement_version": self._experts.version, "num_moved": 0, "imbalance": ratio})
            return
        ratio = _mean_imbalance(found, self._counted)
        version = next_version(self._experts.version)
        self._board.propose(epoch, version, found)
        self._proposal = version, num_moved(present, found), ratio

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
            if self._order is not None and self._order.is_begun:
                self._order.version = version
                self._order.details = {"placement_version": version, "num_moved": num_experts, "imbalance": ratio}
        self._proposal = None

    def _end_order(self, status: int, message: str, details: Details | None = None) -> None:
        assert self._order is not None
        self._answer(Reply(self._order.command_id, status, message, details or {}))
        self._order = None


def _mean_imbalance(placement: Sequence[LayerPlacement], counts: Sequence[Sequence[int]]) -> float:
    ratios = [imbalance(*layer) for layer in zip(placement, counts, strict=True)]
    return sum(ratios) / len(ratios)
