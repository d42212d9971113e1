"""The rank's part of a trace: its steps, their parts, and now and then the ops of one.

Made by the worker, whose `context.tracer` says whether somebody wants it; otherwise nothing is done. The ops of one step in
`OPS_INTERVAL_NS` are timed, since steps of small models are all alike and their ops many; only those of a recorded model
(`TapePlan`) are: device graphs and reference ops have none that could be seen from here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.messages import Step
from engine.process.tracer import OPS, Tracer

if TYPE_CHECKING:
    from ops.cpu.executors import Tape
    from workers.engine.plan import Plan

OPS_INTERVAL_NS = 50_000_000


class StepTrace:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._next_ops_ns = 0
        self._titles: tuple[Tape, list[str]] | None = None

    @property
    def is_on(self) -> bool:
        return self.tracer.is_on

    def began(self, step: Step, begin_ns: int) -> None:
        """A step was started; the CPU has then run its model."""
        end_ns = time.monotonic_ns()
        num_rows = len(step.slots) // 4
        self.tracer.span("forward", begin_ns, end_ns, value=step.step_id, label=f"{num_rows} rows")
        for start in step.starts:
            self.tracer.span("begin sample", begin_ns, end_ns, value=step.step_id, label=start.request_id)

    def ended(self, step: Step, received_ns: int, begin_ns: int, *, is_alone: bool) -> None:
        """It came at `received_ns`; from `begin_ns` on its tokens were waited for and drawn. `is_alone`: no other step began
        meanwhile."""
        end_ns = time.monotonic_ns()
        self.tracer.span("sample", begin_ns, end_ns, value=step.step_id)
        if is_alone:
            self.tracer.span("step", received_ns, end_ns, value=step.step_id)

    def replay(self, plan: Plan, size: int) -> None:
        """Run a model, with the time of each op where it has a record and it is the turn of that."""
        if not self.tracer.is_on:
            plan.replay(size)
            return
        tape = None if size else plan.tape
        begin_ns = time.monotonic_ns()
        if tape is None or begin_ns < self._next_ops_ns:
            plan.replay(size)
            return
        self._next_ops_ns = begin_ns + OPS_INTERVAL_NS
        times_ns = tape.replay_timed()
        if self._titles is None or self._titles[0] is not tape:
            self._titles = tape, tape.titles()
        for title, time_ns in zip(self._titles[1], times_ns, strict=True):
            self.tracer.span(title, begin_ns, begin_ns + time_ns, track=OPS)
            begin_ns += time_ns
