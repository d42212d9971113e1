"""Samples in their order: by priority, then by arrival, then by intake.

Used by the scheduler process for what waits and for what runs. Because the order is total and a preempted sample keeps its
place in it, it comes back before everything that arrived later, and the first of all is never preempted: something always
gets on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.scheduler.sequence import Sample

_rank = attrgetter("rank")


class SampleQueue:
    """Samples sorted by `rank`."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def push(self, sample: Sample) -> None:
        insort(self._samples, sample, key=_rank)

    def remove(self, sample: Sample) -> None:
        index = bisect_left(self._samples, sample.rank, key=_rank)
        assert self._samples[index : index + 1] == [sample], f"{sample.request.request_id} is not queued"
        del self._samples[index]


class WaitingQueue(SampleQueue):
    """What waits for a slot; while the intake is held, newcomers stand aside, counted but not to be admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self._newcomers: dict[str, Sample] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._samples) + len(self._newcomers)

    def add_newcomer(self, sample: Sample) -> None:
        """A sample from the intake."""
        if self.is_held:
            self._newcomers[sample.request.request_id] = sample
        else:
            self.push(sample)

    def remove(self, sample: Sample) -> None:
        if self._newcomers.get(sample.request.request_id) is sample:
            del self._newcomers[sample.request.request_id]
        else:
            super().remove(sample)

    def hold(self) -> None:
        """From now on newcomers stand aside."""
        self.is_held = True

    def let_in(self) -> None:
        """Newcomers take their place in the order."""
        self.is_held = False
        for sample in self._newcomers.values():
            self.push(sample)
        self._newcomers.clear()
