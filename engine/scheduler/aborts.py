"""Samples that end before their end: their client left, their deadline passed, an operator said so, or whoever serves them
died.

Used by the scheduler process alone. An aborted sample gets no further token; its slot and blocks come free with the last step
in flight that has it, that is within a step or two.
"""

from __future__ import annotations

import heapq

from engine.process.context import ActorContext
from engine.scheduler.batch_state import Roster
from engine.scheduler.results import ending_output
from engine.scheduler.sequence import Sample


class Aborts:
    """Ends samples early and keeps their deadlines."""

    def __init__(self, context: ActorContext, roster: Roster) -> None:
        self._roster = roster
        self._deadlines: list[tuple[int, int, str]] = []  # heap of (deadline_ns, order of intake, request id)
        self._aborted = context.counter("requests_aborted_total")

    @property
    def next_deadline_ns(self) -> int:
        """0: none."""
        return self._deadlines[0][0] if self._deadlines else 0

    def watch(self, sample: Sample) -> None:
        """Abort the sample at its deadline, should it have one."""
        if sample.request.deadline_ns:
            heapq.heappush(self._deadlines, (sample.request.deadline_ns, sample.rank[-1], sample.request.request_id))

    def expire(self, now_ns: int) -> int:
        """Abort what is overdue; how many."""
        num_expired = 0
        while self._deadlines:
            deadline_ns, order, request_id = self._deadlines[0]
            sample = self._roster.samples.get(request_id)
            is_open = sample is not None and sample.rank[-1] == order
            if is_open and deadline_ns > now_ns:
                break
            heapq.heappop(self._deadlines)
            if sample is not None and is_open:
                self.abort(sample, "timeout")
                num_expired += 1
        return num_expired

    def abort(self, sample: Sample, reason: str) -> None:
        """End a sample and tell its reader why."""
        sample.reader.add(ending_output(sample, reason))
        self.drop(sample)

    def drop(self, sample: Sample) -> None:
        """End a sample of which nobody wants to hear any more."""
        self._aborted.add(1)
        self._roster.finish(sample)

    def abort_all(self) -> int:
        """End everything; how many."""
        samples = list(self._roster.samples.values())
        for sample in samples:
            self.abort(sample, "abort")
        return len(samples)

    def abort_request(self, request_id: str) -> int:
        """End the sample of this id, or all samples of the HTTP request of this id (of which `api/client/submission.py` makes
        theirs); how many."""
        samples = [sample for name, sample in self._roster.samples.items() if request_id in _names_of(name)]
        for sample in samples:
            self.abort(sample, "abort")
        return len(samples)

    def drop_api(self, api: str, epoch: int) -> None:
        """`api` was started again; the connections of its predecessor are gone."""
        for sample in list(self._roster.samples.values()):
            if sample.request.api == api and sample.request.api_epoch < epoch:
                self.drop(sample)

    def drop_tokenizer(self, tokenizer: str, epoch: int) -> None:
        """`tokenizer` was started again and knows none of its predecessor's samples; the edge submits them anew. They are not
        counted as aborted: each goes on as another attempt."""
        for sample in list(self._roster.samples.values()):
            if sample.request.tokenizer == tokenizer and sample.tokenizer_epoch < epoch:
                self._roster.finish(sample)


def _names_of(request_id: str) -> set[str]:
    """The ids by which an operator may mean a sample: its own, its group's (without the sample's number), its HTTP request's.
    What a client chose ends with a `~` and may have hyphens of its own."""
    names = {request_id, request_id.partition("~")[0]}
    group_id = request_id.rpartition("-")[0]
    if group_id and ("~" in group_id) == ("~" in request_id):
        names.add(group_id)
    return names
