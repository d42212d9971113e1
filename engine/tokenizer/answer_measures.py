"""Metrics of answers with tool calls, reasoning or structured output."""

from __future__ import annotations

import time

from engine.messages import Delta
from engine.process.context import ActorContext


class AnswerMeasures:
    def __init__(self, context: ActorContext) -> None:
        self._num_calls = context.counter("tool_calls_total")
        self._num_malformed = context.counter("malformed_tool_calls_total")
        self._num_reasoning_tokens = context.counter("reasoning_tokens_total")
        self._num_compiled = context.counter("grammars_total", outcome="compiled")
        self._num_refused = context.counter("grammars_total", outcome="refused")
        self._compile_seconds = context.histogram("grammar_compile_seconds")

    def on_parts(self, delta: Delta) -> None:
        """Count the parts of an answer. Parts replayed after a crash are in no delta."""
        self._num_calls.add(sum(part.kind == "call" for part in delta.parts))

    def on_end(self, delta: Delta, num_malformed: int) -> None:
        """Count an answer that ended, with its number of malformed calls."""
        if delta.num_reasoning_tokens:
            self._num_reasoning_tokens.add(delta.num_reasoning_tokens)
        if num_malformed:
            self._num_malformed.add(num_malformed)

    def on_format(self, is_refused: bool, begun_ns: int) -> None:
        """Count a request with structured output that was prepared or rejected; a helper began at `begun_ns` (0: none was
        needed)."""
        (self._num_refused if is_refused else self._num_compiled).add(1)
        if begun_ns:
            self._compile_seconds.observe((time.monotonic_ns() - begun_ns) / 1e9)
