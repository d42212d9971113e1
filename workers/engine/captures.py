"""Which steps are replayed from a capture, and at which size. Pure: decided only from numbers of rows, equally on all ranks.

A captured plan has fixed numbers of rows (`captured_plan.py`), so its steps are padded to one of the sizes. The runner
determines the mode of every step, even without captures, and MTP layers use the same mode.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
import numpy as np


class Phase(enum.IntEnum):
    """Work of the rows of a step."""

    NONE = 0  # no rows
    DECODE = 1  # each row computes the last known token of an answer, and drafts after it
    PREFILL = 2  # some rows compute tokens that were known
    MIXED = 3


class StepShape(msgspec.Struct, frozen=True):
    """Phase and size of a rank's step."""

    phase: Phase
    num_tokens: int
    can_replay: bool = True  # whether the rows need nothing that captures lack

    @staticmethod
    def of(counts: np.ndarray, num_sampled: np.ndarray, *, can_replay: bool = True) -> StepShape:
        """Return the shape of rows with counts[i] positions (int32 [n]), the last num_sampled[i] of which sample. A row that
        samples at every position decodes; the last token of a prompt counts as decoding too."""
        num_tokens, decodes = int(counts.sum()), (counts == num_sampled)[counts > 0]
        if not num_tokens:
            return StepShape(Phase.NONE, 0)
        phase = Phase.DECODE if decodes.all() else Phase.MIXED if decodes.any() else Phase.PREFILL
        return StepShape(phase, num_tokens, can_replay)


class StepMode(msgspec.Struct, frozen=True):
    """How a step runs. MTP layers replay when the model does."""

    phase: Phase
    num_drafts: int  # configured number per row, whatever this step has
    size: int = 0  # captured number of rows to which the step is padded; 0: not padded


class Captures(msgspec.Struct, frozen=True):
    """Captured `sizes`, largest first, of steps of one phase; None: nothing was captured."""

    sizes: tuple[int, ...]
    num_drafts: int
    phase: Phase = Phase.DECODE

    def mode(self, own: StepShape, others: Iterable[StepShape] = ()) -> StepMode:
        """Return the mode of a rank's step. `others`: shapes of the ranks of its group that have rows. Either all ranks replay
        the same size, also those without rows, or none replays."""
        shapes = [shape for shape in (own, *others) if shape.num_tokens]
        size = 0
        if shapes and all(shape.phase is self.phase and shape.can_replay for shape in shapes):
            most = max(shape.num_tokens for shape in shapes)
            size = min((size for size in self.sizes if size >= most), default=0)
        return StepMode(own.phase, self.num_drafts, size)
