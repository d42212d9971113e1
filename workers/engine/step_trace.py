"""The rank's part of a trace: its steps, their parts, and sometimes the ops of a step.

Made by the worker; does nothing unless `context.tracer` is on. Ops are timed for one step per `OPS_INTERVAL_NS`, because the
steps of a small model are alike and have many ops, and only for a recorded model (`TapePlan`): ops of device graphs and of
reference ops are not visible from here.
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
        """Record that a step began; the CPU has then run its model."""
        end_ns = time.monotonic_ns()
        num_rows = len(step.slots) // 4
        self.tracer.span("forward", begin_ns, end_ns, value=step.step_id, label=f"{num_rows} rows")
        for start in step.starts:
            self.tracer.span("begin sample", begin_ns, end_ns, value=step.step_id, label=start.request_id)

    def ended(self, step: Step, received_ns: int, begin_ns: int, *, is_alone: bool) -> None:
        """Record a step that arrived at `received_ns`; waiting for its tokens and sampling began at `begin_ns`. `is_alone`: no
        other step began in between."""
        end_ns = time.monotonic_ns()
        self.tracer.span("sample", begin_ns, end_ns, value=step.step_id)
        if is_alone:
            self.tracer.span("step", received_ns, end_ns, value=step.step_id)

    def replay(self, plan: Plan, size: int) -> None:
        """Run a model, timing each op if it is recorded and due."""
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
