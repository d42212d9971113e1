"""Samples in their order: by priority, then by arrival, then by intake.

Used by the scheduler process for what waits and for what runs. Because the order is total and a preempted sequence keeps its
place in it, it comes back before everything that arrived later, and the first of all is never preempted: something always
gets on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.scheduler.sequence import Sequence

_rank = attrgetter("rank")


class SequenceQueue:
    """Samples sorted by `rank`."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index : index + 1] == [sequence], f"{sequence.request.request_id} is not queued"
        del self._sequences[index]


class WaitingQueue(SequenceQueue):
    """What waits for a slot; while the intake is held, newcomers stand aside, counted but not to be admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self._newcomers: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) + len(self._newcomers)

    def add_newcomer(self, sequence: Sequence) -> None:
        """A sequence from the intake."""
        if self.is_held:
            self._newcomers[sequence.request.request_id] = sequence
        else:
            self.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._newcomers.get(sequence.request.request_id) is sequence:
            del self._newcomers[sequence.request.request_id]
        else:
            super().remove(sequence)

    def hold(self) -> None:
        """From now on newcomers stand aside."""
        self.is_held = True

    def let_in(self) -> None:
        """Newcomers take their place in the order."""
        self.is_held = False
        for sequence in self._newcomers.values():
            self.push(sequence)
        self._newcomers.clear()
