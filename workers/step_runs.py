"""Steps of one rank from start to result: traced, counted, sent. Owned by the worker actor, used by the step loops."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.messages import Message, Step, StepResult
from workers.engine.step_trace import StepTrace
from workers.rank_group.membership import RankGroupMember, SingleRank
from workers.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from workers.runners import Runner


class StepRuns:
    """Runs steps in order. `send` sends messages to the scheduler; of several tensor ranks only the first one sends results."""

    def __init__(
        self,
        runner: Runner,
        group: SingleRank | RankGroupMember,
        tensor_rank: int,
        metrics: WorkerMetrics,
        trace: StepTrace,
        send: Callable[[Message], None],
    ) -> None:
        from workers.extensions.drafts.drafting import Drafting  # as late as the models, which the runner has imported

        self._runner = runner
        self._drafting = runner.core.find(Drafting)
        self._group = group
        self._tensor_rank = tensor_rank
        self._metrics = metrics
        self._trace = trace
        self._send = send
        self._started: deque[tuple[Step, int]] = deque()  # steps, and when they arrived
        self._last_end_ns = 0

    @property
    def num_started(self) -> int:
        """Return the number of started and unfinished steps."""
        return len(self._started)

    @property
    def is_full(self) -> bool:
        """Return whether a step must be finished before the next one starts."""
        return len(self._started) >= self._runner.depth

    @property
    def weight_version(self) -> int:
        """Return the version of the weights in use; 0: none."""
        return self._runner.core.weights.version

    def start(self, step: Step, received_ns: int) -> None:
        self._metrics.began(step.step_id)
        begin_ns = time.monotonic_ns()
        self._runner.core.weights.check()  # another rank sends what this one computes, and may have mapped another file
        self._runner.start(step)
        if self._trace.is_on:
            self._trace.began(step, begin_ns)
        self._started.append((step, received_ns))

    def finish(self) -> None:
        """Send the result of the oldest step, then draft."""
        self.send(self.result())
        self.draft()

    def finish_all(self) -> None:
        while self._started:
            self.finish()

    def drop_all(self) -> None:
        """Finish all steps without sending: their scheduler is gone."""
        while self._started:
            self.result()

    def result(self) -> StepResult:
        """Wait for the oldest step. Raises OutsideError if the mapped weights changed on the disk."""
        step, received_ns = self._started.popleft()
        begin_ns = time.monotonic_ns()
        result = self._runner.finish()
        self._runner.core.weights.check()  # before the result is sent
        if self._trace.is_on:
            self._trace.ended(step, received_ns, begin_ns, is_alone=self._runner.depth == 1)
        result.received_ns = received_ns
        end_ns = time.monotonic_ns()
        if self._last_end_ns and _continues(step):
            result.idle_ns = received_ns - self._last_end_ns
        self._last_end_ns = end_ns
        self._metrics.ended(self._runner.core, result, end_ns - received_ns, self._group.communicators)
        return result

    def send(self, result: StepResult) -> None:
        if self._tensor_rank == 0:
            self._send(result)

    def refuse(self, step: Step) -> None:
        """Answer a step that arrived while the weights are cleared: its scheduler died after sending ClearWeights."""
        error = f"step {step.step_id} arrived while the weights are cleared"
        self._send(StepResult(step.step_id, self._tensor_rank, 0, b"", b"", b"", error=error))

    def run_without_rows(self, received_ns: int) -> None:
        """Run a step of the rank group without rows of this replica."""
        self._runner.core.weights.check()
        self._runner.core.run_without_rows()
        self._runner.core.weights.check()
        self._metrics.ended_without_rows(time.monotonic_ns() - received_ns, self._group.communicators)

    def draft(self) -> None:
        """Draft the tokens that later steps verify."""
        drafting = self._drafting
        begin_ns = time.monotonic_ns()
        draft_ns = self._runner.core.draft()
        if drafting is None or not draft_ns:
            return
        self._metrics.drafted(draft_ns)
        if drafting.has_skipped:
            return
        if self._trace.is_on:
            self._trace.tracer.span("draft", begin_ns)
        self._metrics.take_drafts(drafting, is_first=self._tensor_rank == 0)


def _continues(step: Step) -> bool:
    """Return whether the step has a row of a sequence that ran before and therefore waited while the rank was idle."""
    started = {start.slot for start in step.starts}
    return any(slot not in started for slot in np.frombuffer(step.slots, np.int32).tolist())
