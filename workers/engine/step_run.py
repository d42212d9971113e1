"""One step from its rows to its result, passed along by the runner. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.messages import Step
from workers.engine.captures import Phase, StepMode
from workers.engine.plan import Plan
from workers.engine.rows import StepRows

Missing = dict[bytes, str]  # hash of a media unit -> why its features cannot be read


class StepRun(msgspec.Struct):
    """Step that has begun. Up to two are in flight at a time."""

    step: Step
    rows: StepRows
    plan: Plan
    mode: StepMode = StepMode(Phase.NONE, 0)
    missing: Missing = {}  # if not empty, the step does not run
    encoded: list[bytes] = []  # media units completed by it
    keeps_all: np.ndarray | None = None  # bool [n]: rows that keep hidden states of all positions; None: no row
    kept_ends: np.ndarray = np.zeros(0, np.int64)  # int [n]: where each row ends among the kept ones
    output: Any = None  # state of sampling or pooling
    fetch_draft_tokens: Callable[[], None] | None = None  # copies draft tokens to the slots that so far only the device has
    is_sampled_on_device: bool = False  # whether the next step finds this one's tokens on the device
    late_rows: list[int] = []  # rows that get no token in this step
    counts: np.ndarray = np.zeros(0, np.int32)  # int32 [n]: tokens of each row
    num_tokens: int = 0
    run_ns: int = 0
    sample_ns: int = 0
    step_ns: int = 0  # time of `begin` and `end`
    draft_in_step_ns: int = 0  # thereof for draft tokens
    draft_ns: int = 0  # for draft tokens, after the result was sent
