"""Sorted queues of sequences: waiting ones by place in line, which is the arrival time shifted by priority; running ones by
arrival alone, so that priorities take nothing from running sequences.

Used by the scheduler process. Both orders are total and never change while a sequence lives. The oldest running sequence is
never preempted, so something always progresses. Since a priority shifts a request by less than `max_priority_wait`, only a
limited number can go before it, so none starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from engine.scheduler.fair_share import FairShare
from engine.scheduler.sequence import Sequence

_rank, _seniority = attrgetter("rank"), attrgetter("seniority")
_HALF_LEVEL = 14  # with --max-priority-wait 30, priority 1 is worth 1 s, and 14 is worth half of the maximum


def place_in_line(priority: int, arrival_ns: int, max_wait_ns: int) -> int:
    """Return the time at which a request counts as having arrived: later for a worse (higher) priority, earlier for a better
    one, by priority / (|priority| + 14) of half of `max_wait_ns`. Waiting improves all waiting requests equally, so that ageing
    needs no clock: a request that arrives `max_wait_ns` after another is always behind it."""
    moved_ns = max_wait_ns // 2 * abs(priority) // (abs(priority) + _HALF_LEVEL)
    return arrival_ns + (moved_ns if priority > 0 else -moved_ns)


class SequenceQueue:
    """Sequences sorted by `key`."""

    def __init__(self, key: Callable[[Sequence], tuple[int, ...]] = _rank) -> None:
        self._key = key
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, self._key(sequence), key=self._key)
        assert self._sequences[index : index + 1] == [sequence], f"{sequence.request.own.request_id} is not queued"
        del self._sequences[index]


class RunningQueue(SequenceQueue):
    """Running sequences, oldest first; the last one is preempted first."""

    def __init__(self) -> None:
        super().__init__(_seniority)


class WaitingQueue(SequenceQueue):
    """Sequences that wait for a slot. `fair_share.py` orders them. While the intake is held, new requests wait outside: they
    are counted, but not admitted. Sequences that began before, and will be submitted again because their tokenizer died, are
    waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self.num_tokens_to_compute = 0  # of all waiting sequences
        self._turns = FairShare()
        self._num_of: dict[str, int] = {}  # waiting sequences by source
        self._new_requests: dict[str, Sequence] = {}
        self._away: dict[str, tuple[str, int]] = {}  # request id -> its api, and the time until which it is waited for

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._turns)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) + len(self._new_requests)

    def num_of(self, source: str) -> int:
        """Return how many sequences of `source` wait."""
        return self._num_of.get(source, 0)

    def began(self, sequence: Sequence) -> None:
        """Move a sequence from waiting to running."""
        self._turns.began(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Note that a sequence no longer runs."""
        self._turns.ended(sequence)

    def add_new_request(self, sequence: Sequence) -> None:
        """Add a sequence from the intake."""
        if self.is_held:
            self._count(sequence, 1)
            self._new_requests[sequence.request.own.request_id] = sequence
        else:
            self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        self._count(sequence, 1)
        self._line_up(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        if self._new_requests.get(sequence.request.own.request_id) is sequence:
            del self._new_requests[sequence.request.own.request_id]
        else:
            super().remove(sequence)
            self._turns.remove(sequence)

    def hold(self) -> None:
        """Make new requests wait outside from now on."""
        self.is_held = True

    def let_in(self) -> None:
        """Move the new requests into the queue."""
        self.is_held = False
        self._away.clear()
        for sequence in self._new_requests.values():
            self._line_up(sequence)
        self._new_requests.clear()

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens_to_compute += sign * sequence.num_tokens_to_compute
        source = sequence.request.shared.source
        self._num_of[source] = self._num_of.get(source, 0) + sign
        if not self._num_of[source]:
            del self._num_of[source]

    def _line_up(self, sequence: Sequence) -> None:
        super().push(sequence)
        self._turns.push(sequence)

    def expect_back(self, sequence: Sequence, deadline_ns: int) -> None:
        """Wait for a sequence that the api process will submit again, unless it was outside: until then it counts as one that
        must run to its end."""
        request = sequence.request
        if self.is_held and request.own.request_id not in self._new_requests:
            self._away[request.own.request_id] = (request.shared.api, deadline_ns)

    def came_back(self, request_id: str) -> None:
        """Stop waiting for a sequence: it came back, was aborted, or has ended."""
        self._away.pop(request_id, None)

    def api_died(self, api: str) -> None:
        """Stop waiting for sequences of an api process that died."""
        self._away = {request_id: away for request_id, away in self._away.items() if away[0] != api}

    def is_expecting(self, now_ns: int) -> bool:
        return any(deadline_ns > now_ns for _, deadline_ns in self._away.values())
