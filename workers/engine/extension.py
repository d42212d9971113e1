"""Parts of a step that not every model has: the hooks that the runner calls, in the order of a step.

Implemented by `workers/extensions/` and `workers/selftest/`; the runner holds a list of them and knows none by name.

    load     on_load, then on_capture for each captured size and on_warm_up; on_forget_captures; on_unload
    begin    on_step | on_start for each new sequence | choose_drafts | on_rows | before_inputs | before_run |
             the model runs | after_run
    end      before_sample | tokens are sampled | after_result
    draft    after_send
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.messages import SlotStart, Step, StepResult
from workers.engine.captures import StepMode
from workers.engine.plan import Plan
from workers.engine.step_run import StepRun

if TYPE_CHECKING:
    from workers.models.loading import LoadedModel


class Extension:
    """Hooks that do nothing. A subclass overrides those that it needs."""

    has_drafts = False  # proposes draft tokens, so a step cannot begin before the result of the last one is known

    # ------------------------------------------------------------------------------------------------------ weights

    def on_load(self, loaded: LoadedModel, version: int) -> None:
        """Use the weights of `loaded` from now on. An error keeps the present ones."""

    def on_unload(self) -> None:
        """Release the weights."""

    def on_capture(self, plan: Plan, mode: StepMode) -> None:
        """Capture the work of a step of `mode`; the model has just run one without rows."""

    def on_warm_up(self) -> None:
        """Capture work that does not depend on the model's sizes."""

    def on_forget_captures(self) -> None:
        """Drop the captures; they are made again."""

    # -------------------------------------------------------------------------------------------------- begin of a step

    def on_step(self, step: Step) -> None:
        """Handle a new step; its sequences have not taken their slots yet."""

    def on_start(self, start: SlotStart) -> None:
        """Handle a sequence that took its slot, which was reset."""

    def choose_drafts(self, slots: np.ndarray, counts: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """Return how many of the counts[i] draft tokens of slots[i] (int32 [n] each) the step verifies. Without them it has
        `num_rows` rows, `num_sampled` of which sample. Only called if an extension has drafts."""
        return counts

    def on_rows(self, run: StepRun) -> None:
        """Check the step's rows. Fill `run.missing` to report the step instead of running it."""

    def before_inputs(self, run: StepRun) -> None:
        """Prepare the step; the inputs of its rows are set next."""

    def before_run(self, run: StepRun) -> None:
        """Prepare the run; the inputs are set and the model runs next."""

    def after_run(self, run: StepRun) -> None:
        """Continue after the model and its first logits are enqueued."""

    # ---------------------------------------------------------------------------------------------------- end of a step

    def before_sample(self, run: StepRun) -> None:
        """Prepare sampling, which is next."""

    def after_result(self, run: StepRun, result: StepResult) -> None:
        """Continue after the slots have the step's tokens; add fields to `result`."""

    def after_send(self, run: StepRun) -> None:
        """Continue after the result is sent. Add the time used to `run.draft_ns`."""
