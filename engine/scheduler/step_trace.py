"""The scheduler's part of a trace: dispatch and results of steps, and the requests in them."""

from __future__ import annotations

import time

from engine.process.tracer import Tracer
from engine.scheduler.dispatch import StepInFlight
from engine.scheduler.policy import SchedulerOutput
from engine.scheduler.sequence import SequenceState


def trace_dispatch(tracer: Tracer, flight: StepInFlight, output: SchedulerOutput, begin_ns: int) -> None:
    """Record that a step was chosen and sent."""
    end_ns = time.monotonic_ns()
    text = f"{len(flight.rows)} rows, {flight.num_tokens} tokens"
    tracer.span("schedule", begin_ns, end_ns, value=flight.step_id, label=text)
    for admission in output.admitted:
        tracer.span("admit", begin_ns, end_ns, value=flight.step_id, label=admission.sequence.request.own.request_id)


def trace_result(tracer: Tracer, step: StepInFlight, num_taken: list[int], begin_ns: int) -> None:
    """Record that a result was handled from `begin_ns` on, with the first tokens. `num_taken`: tokens of each sequence."""
    end_ns = time.monotonic_ns()
    tracer.span("result", begin_ns, end_ns, value=step.step_id)
    for row, num_tokens in zip(step.rows, num_taken, strict=True):
        sequence = row.sequence
        is_first = sequence.first_token_ns == begin_ns
        is_last = sequence.state is SequenceState.FINISHED and (num_tokens or not row.is_sampling)  # not for a later step
        if is_first or is_last:
            name = "first result" if is_first else "last result"
            tracer.span(name, begin_ns, end_ns, value=step.step_id, label=sequence.request.own.request_id)
