"""The model part of a step: sets the rows in the inputs, pads them for a replay, and runs the plan.

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
    """Rows of `slots` in `inputs`. `runs_without_rows`: ranks that share experts need this rank in every step."""

    def __init__(self, inputs: StepInputs, slots: BatchSlots, *, runs_without_rows: bool) -> None:
        self.inputs, self.slots = inputs, slots
        self._runs_without_rows = runs_without_rows
        self.replay: Callable[[Plan, int], None] = replay  # replaced by a trace

    def set_rows(self, rows: StepRows, kept_counts: np.ndarray, mode: StepMode, flags: np.ndarray | None = None) -> None:
        """Set the rows, and pad them after all their inputs are set."""
        self.inputs.set_rows(rows.slots, rows.starts, rows.counts, kept_counts, self.slots.token_ids, self.slots, flags)
        if mode.size:
            self.inputs.pad(mode.size)

    def run(self, plan: Plan, mode: StepMode) -> None:
        """Run the rows that are set, up to the hidden states of the kept ones."""
        if self.inputs.num_tokens or mode.size or self._runs_without_rows:
            self.replay(plan, mode.size)


def replay(plan: Plan, size: int) -> None:
    """Run `plan`."""
    plan.replay(size)
