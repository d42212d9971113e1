"""A model as native ops recorded once: no Python between the ops of a step.

Made by `plan.make_plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ops.cpu.array import Array, address_of
from ops.cpu.executors import Recording, Tape
from ops.cpu.rank_group import RankGroup
from ops.cpu.table import make_table
from ops.modules import KvCache, Tensor
from ops.table import NUM_LOGIT_ROWS
from workers.engine.inputs import StepInputs
from workers.models import Model


class TapePlan:
    """The model as two lists of native ops over arenas, replayed without the GIL: `tape` computes hidden states of the kept
    rows, `head` the logits of as many of them as the inputs hold at a time."""

    failed_sizes: Collection[int] = ()
    captured: Mapping[int, object] = {}

    def __init__(self, model: Model, inputs: StepInputs, cache: KvCache, rank_group: RankGroup | None = None) -> None:
        self._inputs = inputs
        recording = Recording(rank_group)
        self._hidden = model.forward(make_table(recording), inputs, cache)
        self.tape: Tape = recording.finish(self._hidden)
        if model.head is None:
            return
        recording = Recording(rank_group)
        rows = recording.rows(inputs.host_counts, NUM_LOGIT_ROWS, inputs.max_logit_rows)
        self._logits = model.logits(make_table(recording), self._hidden, Array(rows, 1, address_of(inputs.logit_row_ids)))
        self.head = recording.finish(self._logits)

    def replay(self, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        inputs = self._inputs
        assert inputs.num_rows <= inputs.max_rows, f"the tape is for {inputs.max_rows} rows, but the step has {inputs.num_rows}"
        self.tape.replay()

    def forget(self) -> None:
        """Do nothing: tapes stay valid."""

    def hidden(self) -> np.ndarray:
        hidden: np.ndarray = self._hidden.numpy()
        return hidden

    def logits(self) -> Tensor:
        self.head.replay()
        return self._logits

    def drawn(self, logits: Tensor) -> Tensor:
        raise AssertionError("with native ops the host samples")
