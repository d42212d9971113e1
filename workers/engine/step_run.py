"""One step from its rows to its result, as the runner hands it on. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.messages import Step
from workers.engine.captures import Phase, StepMode
from workers.engine.plan import Plan
from workers.engine.rows import StepRows

Missing = dict[bytes, str]  # a unit of media -> why its features cannot be read


class StepRun(msgspec.Struct):
    """A step that was begun. Up to two of them are under way at a time."""

    step: Step
    rows: StepRows
    plan: Plan
    mode: StepMode = StepMode(Phase.NONE, 0)
    missing: Missing = {}  # not empty: the step is not run
    encoded: list[bytes] = []  # units of media that are complete with it
    keeps_all: np.ndarray | None = None  # bool [n]: rows of which all positions keep their hidden states; None: none
    kept_ends: np.ndarray = np.zeros(0, np.int64)  # int [n]: where each row ends among the kept ones
    output: Any = None  # what sampling or pooling keeps of the step
    fetch_draft_tokens: Callable[[], None] | None = None  # puts draft tokens into the slots that only the device has yet
    is_sampled_on_device: bool = False  # the next step finds this one's tokens on the device
    late_rows: list[int] = []  # rows that get no token in this step
    counts: np.ndarray = np.zeros(0, np.int32)  # int32 [n]: tokens that each row got
    num_tokens: int = 0
    run_ns: int = 0
    sample_ns: int = 0
    step_ns: int = 0  # of `begin` and `end` together
    draft_in_step_ns: int = 0  # of this, for draft tokens
    draft_ns: int = 0  # for draft tokens after the result was sent
