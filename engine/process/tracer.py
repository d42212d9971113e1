"""Trace events of an actor's work, recorded while a trace is on.

Each actor has a `Tracer` (`context.tracer`). The work loop lets it check several times a second whether a trace was begun or
ended; without one, `is_on` is False and nothing else happens. Check `is_on` before recording:

    begin_ns = time.monotonic_ns()
    ...
    if tracer.is_on:
        tracer.span("schedule", begin_ns, value=step_id)

The events of an actor's thread nest like its calls. An event of a request has the request id as label:
`tools/trace/perfetto.py` connects these through all actors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shm.counters import Counters

if TYPE_CHECKING:
    from shm.trace import TraceWriter

LOOP, OPS = 0, 1  # tracks


class Tracer:
    __slots__ = ("_actor", "_counters", "_generation", "_ids", "_run_id", "_writer", "is_on")

    def __init__(self, run_id: str, actor: str, counters: Counters) -> None:
        self._run_id = run_id
        self._actor = actor
        self._counters = counters
        self._generation = 0  # of the current trace; 0: there was none
        self._writer: TraceWriter | None = None
        self._ids: dict[str, int] = {}
        self.is_on = False

    def look(self) -> None:
        """Begin or end the trace as requested."""
        generation = self._counters.trace_generation
        if generation == self._generation:
            return
        from shm.trace import TraceRing

        self.stop()
        self._generation = generation
        ring = TraceRing.attach(self._run_id, self._actor)
        if ring is not None:
            self._writer = ring.writer()
            self.is_on = True

    def span(self, name: str, begin_ns: int, end_ns: int = 0, *, value: int = 0, label: str = "", track: int = LOOP) -> None:
        """Record work from `begin_ns` to `end_ns` (CLOCK_MONOTONIC; 0: now). `name`: one of few; `label`: a request id, or
        another distinction."""
        if self._writer is None:
            return
        name_id = self._ids.get(name)
        if name_id is None:
            name_id = self._ids[name] = self._writer.name_id(name)
        if not self._writer.record(name_id, begin_ns, end_ns or time.monotonic_ns(), value, label, track):
            self.stop()

    def stop(self) -> None:
        """End the trace."""
        self.is_on = False
        self._writer = None
        self._ids = {}
