"""Sequences that end early: client disconnected, deadline passed, aborted by an operator, or their tokenizer or api died.

Used by the scheduler process alone. An aborted sequence gets no further token; its slot and blocks are freed after the last
step in flight that has it, within a step or two.
"""

from __future__ import annotations

import heapq
import time

from engine.process.context import ActorContext
from engine.process.topology import LINK, role_of
from engine.scheduler.batch_state import BatchState
from engine.scheduler.results import ending_output
from engine.scheduler.sequence import Sequence

RETURN_TIMEOUT_NS = 30_000_000_000  # a tokenizer loads in seconds; a sequence that it finds ended never comes back


class Aborts:
    """Ends sequences early and keeps their deadlines."""

    def __init__(self, context: ActorContext, batch: BatchState) -> None:
        self._batch = batch
        self._deadlines: list[tuple[int, int, str]] = []  # heap of (deadline_ns, order of intake, request id)
        self._aborted = context.counter("requests_aborted_total")

    @property
    def next_deadline_ns(self) -> int:
        """Return the next deadline; 0: none."""
        return self._deadlines[0][0] if self._deadlines else 0

    def watch(self, sequence: Sequence) -> None:
        """Abort the sequence at its deadline, if it has one."""
        if sequence.request.shared.deadline_ns:
            heapq.heappush(
                self._deadlines, (sequence.request.shared.deadline_ns, sequence.rank[-1], sequence.request.own.request_id)
            )

    def expire(self, now_ns: int) -> int:
        """Abort overdue sequences; return how many."""
        num_expired = 0
        while self._deadlines:
            deadline_ns, order, request_id = self._deadlines[0]
            sequence = self._batch.sequences.get(request_id)
            is_open = sequence is not None and sequence.rank[-1] == order
            if is_open and deadline_ns > now_ns:
                break
            heapq.heappop(self._deadlines)
            if sequence is not None and is_open:
                self.abort(sequence, "timeout")
                num_expired += 1
        return num_expired

    def abort(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and report the reason to its reader."""
        sequence.reader.add(ending_output(sequence, reason))
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a sequence without telling its tokenizer."""
        self._aborted.add(1)
        self._batch.finish(sequence)

    def abort_all(self) -> int:
        """End all sequences; return how many."""
        sequences = list(self._batch.sequences.values())
        for sequence in sequences:
            self.abort(sequence, "abort")
        return len(sequences)

    def abort_request(self, request_id: str) -> int:
        """End the sequence of this id, or all sequences of the HTTP request of this id (`api/submission.py` derives theirs from
        it). Return how many."""
        sequences = [sequence for name, sequence in self._batch.sequences.items() if request_id in _names_of(name)]
        for sequence in sequences:
            self.abort(sequence, "abort")
        return len(sequences)

    def drop_api(self, api: str, epoch: int) -> None:
        """Drop the sequences of an api process that was restarted: its connections are gone."""
        self._batch.waiting.api_died(api)
        for sequence in list(self._batch.sequences.values()):
            if sequence.request.shared.api == api and sequence.request.shared.api_epoch < epoch:
                self.drop(sequence)

    def drop_tokenizer(self, tokenizer: str, epoch: int) -> None:
        """Drop the sequences of a tokenizer that was restarted and no longer knows them; the api process submits them again.
        They are not counted as aborted: each continues as another attempt, and would find its own prompt in the prefix cache.
        Those of a link are not awaited, since their router may continue them on another engine."""
        deadline_ns = time.monotonic_ns() + RETURN_TIMEOUT_NS
        for sequence in list(self._batch.sequences.values()):
            if sequence.request.tokenizer == tokenizer and sequence.tokenizer_epoch < epoch:
                if role_of(tokenizer) != LINK:
                    self._batch.waiting.expect_back(sequence, deadline_ns)
                self._batch.finish(sequence)


def _names_of(request_id: str) -> set[str]:
    """Return the ids by which an operator may name a sequence: its own, its group's (without the sequence's number), its HTTP
    request's. The part that a client chose ends with a `~` and may contain hyphens."""
    names = {request_id, request_id.partition("~")[0]}
    group_id = request_id.rpartition("-")[0]
    if group_id and ("~" in group_id) == ("~" in request_id):
        names.add(group_id)
    return names
