"""Clock of a rank group with shared experts: counts the steps begun in the current epoch. Every rank runs each of them once,
with rows or without.

Used by the worker. A rank with rows that has run all steps so far advances the clock by compare-and-exchange and wakes the
others; no rank polls for work. A rank behind the clock runs the next step.
"""

from __future__ import annotations

from workers.rank_group.communicator import Communicator


class RankGroupClock:
    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._epoch = 0
        self._is_member = False
        self.num_done = 0  # steps of the epoch run by this rank
        self.num_begun_here = 0  # steps begun by this rank, in all epochs

    def join(self, is_member: bool) -> None:
        """Handle a join of the communicator: in a new epoch, steps are counted from zero. A rank that is not a member runs
        none."""
        self._is_member = is_member
        if self._epoch != self._communicator.epoch:
            self._epoch = self._communicator.epoch
            self.num_done = 0

    @property
    def is_ahead(self) -> bool:
        """Return whether there is a step that this rank has not run."""
        return self.is_beyond(self._communicator.header.clock)

    def is_beyond(self, clock: int) -> bool:
        """Return the same for a clock that was read before."""
        return self._is_member and self._communicator.header.num_begun(clock, self._epoch) > self.num_done

    def begin(self) -> bool:
        """Begin the next step with rows of this rank; return False if another one is already begun."""
        is_begun = self._is_member and self._communicator.header.begin_next(self._epoch, self.num_done)
        self.num_begun_here += is_begun
        return is_begun

    def end_step(self) -> None:
        """Record that this rank has run a step."""
        self.num_done += 1
