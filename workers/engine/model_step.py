"""The model's part of a step: its rows are set in the inputs, padded if they are replayed, and the plan runs.

Owned by the runner.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workers.engine.batch_slots import BatchSlots
from workers.engine.captures import StepMode
from workers.engine.inputs import StepInputs
from workers.engine.plan import Plan
from workers.engine.rows import StepRows


class ModelStep:
    """Rows of `slots` in `inputs`. `runs_without_rows`: the ranks that share experts need this one in every step."""

    def __init__(self, inputs: StepInputs, slots: BatchSlots, *, runs_without_rows: bool) -> None:
        self.inputs, self.slots = inputs, slots
        self._runs_without_rows = runs_without_rows
        self.replay: Callable[[Plan, int], None] = replay  # a trace puts its own here

    def set_rows(self, rows: StepRows, kept_counts: np.ndarray, mode: StepMode, flags: np.ndarray | None = None) -> None:
        """Padding comes when all inputs of the rows are there."""
        self.inputs.set_rows(rows.slots, rows.starts, rows.counts, kept_counts, self.slots.token_ids, self.slots, flags)
        if mode.size:
            self.inputs.pad(mode.size)

    def run(self, plan: Plan, mode: StepMode) -> None:
        """Run the rows that are set, up to the hidden states of those that are kept."""
        if self.inputs.num_tokens or mode.size or self._runs_without_rows:
            self.replay(plan, mode.size)


def replay(plan: Plan, size: int) -> None:
    """Run `plan`."""
    plan.replay(size)
