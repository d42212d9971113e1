"""The end of a step: tokens (`workers/sampling/`) or pooled vectors (`workers/extensions/pooling.py`)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.messages import StepResult
from workers.engine.step_run import StepRun


class Output(Protocol):
    """Turns hidden states of a step's rows into its result."""

    def prepare(self, run: StepRun) -> tuple[np.ndarray, np.ndarray | None]:
        """Set `run.kept_ends`; return how many positions at the end of each row are kept (int32 [n]), and the flags for
        `DeviceInputs.set_rows`, if any."""

    def begin(self, run: StepRun) -> None:
        """Enqueue the work after the model."""

    def end(self, run: StepRun) -> StepResult:
        """Wait for it; set `run.counts`."""
