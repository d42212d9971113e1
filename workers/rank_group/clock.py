"""The clock of a rank group whose ranks share experts: it counts the steps that were begun in the rank group's epoch, and
every rank runs each of them once, with rows of its own or without.

Used by the worker. Whoever has rows, and has run all steps so far, moves the clock by compare-and-exchange and wakes the
others; nobody asks whether there is work. A rank that is behind the clock runs the next step.
"""

from __future__ import annotations

from workers.rank_group.communicator import Communicator


class RankGroupClock:
    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._epoch = 0
        self._is_member = False
        self.num_done = 0  # steps of the epoch that this rank has run
        self.num_begun_here = 0  # that this rank began, in all

    def join(self, is_member: bool) -> None:
        """The communicator has joined another epoch: steps count anew. In the same one they do not. Who is no member runs
        none."""
        self._is_member = is_member
        if self._epoch != self._communicator.epoch:
            self._epoch = self._communicator.epoch
            self.num_done = 0

    @property
    def is_ahead(self) -> bool:
        """There is a step that this rank has not run."""
        return self.is_beyond(self._communicator.header.clock)

    def is_beyond(self, clock: int) -> bool:
        """The same, of a clock that was read before."""
        return self._is_member and self._communicator.header.num_begun(clock, self._epoch) > self.num_done

    def begin(self) -> bool:
        """Begin the next step, for which this rank has rows. False: there is one already."""
        is_begun = self._is_member and self._communicator.header.begin_next(self._epoch, self.num_done)
        self.num_begun_here += is_begun
        return is_begun

    def end_step(self) -> None:
        """This rank has run a step."""
        self.num_done += 1
