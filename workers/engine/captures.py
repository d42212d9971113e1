"""Which steps are replayed as they were captured, and how large. Pure: decided from numbers of rows alone, alike on all ranks.

A captured plan has its numbers of rows fixed (`captured_plan.py`), so a step that takes it is padded to one of the sizes. The
runner says how a step is run whether anything is captured or not, and tells layers that draft the same.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
import numpy as np


class Phase(enum.IntEnum):
    """Work of the rows of a step."""

    NONE = 0  # there are none
    DECODE = 1  # each computes the last known token of an answer, and drafts behind it
    PREFILL = 2  # each computes tokens that were known
    MIXED = 3


class StepShape(msgspec.Struct, frozen=True):
    """Phase and size of a rank's step."""

    phase: Phase
    num_tokens: int
    can_replay: bool = True  # nothing of it is what no capture has

    @staticmethod
    def of(counts: np.ndarray, num_sampled: np.ndarray, *, can_replay: bool = True) -> StepShape:
        """Return the shape of rows with counts[i] positions (int32 [n]), the last num_sampled[i] of which get a token. A row
        that samples at every position decodes; a prompt's last token is no different from an answer's."""
        num_tokens, decodes = int(counts.sum()), (counts == num_sampled)[counts > 0]
        if not num_tokens:
            return StepShape(Phase.NONE, 0)
        phase = Phase.DECODE if decodes.all() else Phase.MIXED if decodes.any() else Phase.PREFILL
        return StepShape(phase, num_tokens, can_replay)


class StepMode(msgspec.Struct, frozen=True):
    """How a step is run: by layers that draft too, which replay what they captured iff the model does."""

    phase: Phase
    num_drafts: int  # of a row at most: as many as are configured, whatever this step has
    size: int = 0  # rows that it is padded to, as it was captured; 0: it runs with the rows that it has


class Captures(msgspec.Struct, frozen=True):
    """Captured `sizes`, the largest first, of steps of one phase. None: nothing was captured."""

    sizes: tuple[int, ...]
    num_drafts: int
    phase: Phase = Phase.DECODE

    def mode(self, own: StepShape, others: Iterable[StepShape] = ()) -> StepMode:
        """Return the mode of a rank's step beside `others`, those of the ranks of its rank group that have rows: either all
        replay the same size, ranks without rows too, or none replays."""
        shapes = [shape for shape in (own, *others) if shape.num_tokens]
        size = 0
        if shapes and all(shape.phase is self.phase and shape.can_replay for shape in shapes):
            most = max(shape.num_tokens for shape in shapes)
            size = min((size for size in self.sizes if size >= most), default=0)
        return StepMode(own.phase, self.num_drafts, size)
