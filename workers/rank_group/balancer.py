"""Moves experts between the ranks that share them, based on counts of their rows.

Called by the worker between steps. The member with the lowest rank leads: at intervals it reads the counts of all ranks (no
collective), computes a placement in a thread, and proposes it. Every rank faults in the weights of its new experts and reports
that it is ready. Then the leader puts the version in force two steps ahead of the clock. No rank can reach that step before the
leader has run the one before it, so all see the word in time. If the rank group breaks meanwhile, all ranks have the old
version in force, or all have the new one (`balance_board.py`).

A command of an operator takes the same way immediately, on the leading rank. If no rank has rows, the leader begins steps
without rows until the version's step.
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
    """Counts that the leader read at one time."""

    at_s: float
    num_steps: int  # steps run by the rank group
    counts: np.ndarray  # totals [layers, experts] of all ranks


class _Command(msgspec.Struct):
    """Command of an operator."""

    command_id: str
    is_forced: bool
    is_begun: bool = False  # whether a search or proposal for it is running
    version: int | None = None  # put in force for it
    details: Details = {}


class FixedPlacement:
    """Null object for a rank whose experts do not move."""

    wants_step = False
    is_settled = True

    def join(self) -> None:
        pass

    def begin_step(self, number: int) -> None:
        pass

    def advance(self, now_s: float) -> None:
        pass

    def close(self) -> None:
        pass


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
        self._last_change = 0  # step number
        self._found: Future[tuple[LayerPlacement, ...] | None] | None = None
        self._faulted: tuple[int, Future[None]] | None = None  # the version being faulted in
        self._counted: list[list[int]] = []  # counts used by the running search
        self._proposal: tuple[int, int, float] | None = None  # version, number of moved experts, resulting max/mean
        self._command: _Command | None = None
        self._settled: tuple[int, int] | None = None  # the board's words when there was nothing to do

    def join(self) -> None:
        """Join another epoch: proposals of the last one are void, the placement in force stays."""
        if self._epoch == self._experts.epoch:
            return
        self._epoch = self._experts.epoch
        self._settled = None
        self._found = self._faulted = self._proposal = None
        self._take(self._board.seal(self._experts.epoch))
        if self._command is not None:
            self._command.is_begun = False  # starts again, unless its version is in force

    def rebalance(self, command_id: str, *, is_forced: bool) -> None:
        """Move experts now, and answer the command."""
        self._command = _Command(command_id, is_forced)
        self._settled = None

    @property
    def wants_step(self) -> bool:
        """Return whether a command waits for its version's step, which may have no rows."""
        return self._command is not None and self._board.in_force.version != self._experts.version

    @property
    def is_settled(self) -> bool:
        """Return whether there is nothing to do until a step runs or a word on the board changes."""
        return self._settled is not None and self._settled == self._board.words

    def begin_step(self, number: int) -> None:
        """Update the placement before step `number` of the rank group."""
        self._num_steps += 1
        self._settled = None
        found = self._board.in_force
        if found.epoch == self._experts.epoch and number >= found.number:
            self._take(found)

    def advance(self, now_s: float) -> None:
        """Advance between two steps, or while there are none."""
        if self.is_settled:
            return
        words = self._board.words
        epoch, members = self._experts.epoch, self._experts.communicator.members
        if self._experts.communicator.rank in members:
            self._get_ready(epoch)
        command = self._command
        if command is not None and command.version == self._experts.version:
            self._end_command(200, f"moved {command.details['num_moved']} experts", command.details)
        if members and members[0] == self._experts.communicator.rank:
            self._lead(epoch, now_s)
        elif self._command is not None:
            self._end_command(503, f"rank {members[0] if members else 'none'} now leads the rank group; try again")
        is_leader = bool(members) and members[0] == self._experts.communicator.rank
        if not self._is_under_way(epoch) and (not is_leader or self._has_looked):
            self._settled = words

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _is_under_way(self, epoch: int) -> bool:
        """Return whether a command, search or proposal is running."""
        is_leading = self._command is not None or self._found is not None or self._proposal is not None
        return is_leading or self._board.proposed(epoch) == next_version(self._experts.version)

    @property
    def _has_looked(self) -> bool:
        """Return whether all counts have been read: no step has run since."""
        return bool(self._looks) and self._looks[-1].num_steps == self._num_steps

    # ------------------------------------------------------------------------------------------------------- everybody

    def _take(self, found: InForce) -> None:
        if found.version != self._experts.version:
            self._experts.place(self._board.placement(found.version), found.version)

    def _get_ready(self, epoch: int) -> None:
        """Fault in the experts that a proposal brings to this rank. A rank that has not reached the version before is not ready
        for the next."""
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
            return  # the last version's step has not come yet
        if self._proposal is not None:
            self._put_in_force(epoch, self._proposal)
        elif self._found is not None:
            if self._found.done():
                found, self._found = self._found.result(), None
                self._propose(epoch, found)
        elif self._command is not None:
            self._carry_out(self._command, now_s)
        elif not self._looks or now_s - self._looks[-1].at_s >= self._config.check_interval_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        config, looks = self._config, self._looks
        if self._note(now_s) and len(looks) > 1 and self._num_steps - self._last_change >= config.step_interval:
            self._search(self._counts())

    def _note(self, now_s: float) -> bool:
        """Read the counts; return False if no step has run since."""
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

    def _carry_out(self, command: _Command, now_s: float) -> None:
        """Carry out a command, by the counts of the window, or of all time if it is empty."""
        self._note(now_s)
        counts = self._counts() if len(self._looks) > 1 else []
        command.is_begun = True
        self._search(counts if any(map(any, counts)) else self._board.counts.sum(axis=0).tolist(), is_forced=command.is_forced)

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
            if self._command is not None and self._command.is_begun:
                ratio = _mean_imbalance(present, self._counted)
                text = f"no experts moved: max/mean of the ranks' rows is {ratio:.3f}, and moving would not improve it"
                self._end_command(200, text, {"placement_version": self._experts.version, "num_moved": 0, "imbalance": ratio})
            return
        ratio = _mean_imbalance(found, self._counted)
        version = next_version(self._experts.version)
        self._board.propose(epoch, version, found)
        self._proposal = version, num_moved(present, found), ratio

    def _put_in_force(self, epoch: int, proposal: tuple[int, int, float]) -> None:
        """Put the proposal in force once all ranks are ready. If the word was sealed meanwhile, it stays, and the next epoch
        begins without a proposal."""
        version, num_experts, ratio = proposal
        before = self._board.in_force
        members = self._experts.communicator.members
        if before.epoch != epoch or not all(self._board.is_ready(rank, epoch, version) for rank in members):
            return
        header = self._experts.communicator.header
        number = header.num_begun(header.clock, epoch) + 2
        if self._board.replace(before, InForce.of(epoch, number, version)):
            self._on_change(num_experts, ratio)
            if self._command is not None and self._command.is_begun:
                self._command.version = version
                self._command.details = {"placement_version": version, "num_moved": num_experts, "imbalance": ratio}
        self._proposal = None

    def _end_command(self, status: int, message: str, details: Details | None = None) -> None:
        assert self._command is not None
        self._answer(Reply(self._command.command_id, status, message, details or {}))
        self._command = None


def _mean_imbalance(placement: Sequence[LayerPlacement], counts: Sequence[Sequence[int]]) -> float:
    ratios = [imbalance(*layer) for layer in zip(placement, counts, strict=True)]
    return sum(ratios) / len(ratios)
