"""A model run op by op, with any op table of the device.

Made by `plan.make_plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ops.cpu.executors import Tape
from ops.modules import KvCache, Tensor
from ops.table import OpTable
from workers.engine.inputs import StepInputs
from workers.models import Model


class EagerPlan:
    tape: Tape | None = None
    failed_sizes: Collection[int] = ()
    captured: Mapping[int, object] = {}

    def __init__(self, model: Model, ops: OpTable, inputs: StepInputs, cache: KvCache, max_sync_free_rows: int = 0) -> None:
        """`max_sync_free_rows`: largest number of rows for which the host waits for no result of the device. With more rows
        waiting is faster, because data shared by rows is then read once."""
        self._model = model
        self._ops = ops
        self._sync_free_ops = ops.sync_free()
        self._max_sync_free_rows = max_sync_free_rows
        self._inputs = inputs
        self._cache = cache

    def replay(self, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        self._run()

    def _run(self) -> None:
        ops = self._sync_free_ops if self._inputs.num_rows <= self._max_sync_free_rows else self._ops
        self._hidden = self._model.forward(ops, self._inputs, self._cache)

    def forget(self) -> None:
        """Do nothing: nothing was captured."""

    def hidden(self) -> np.ndarray:
        return np.asarray(self._hidden.numpy())

    @property
    def hidden_there(self) -> Tensor:
        """Return hidden states of the kept rows, on the device."""
        return self._hidden

    def logits(self) -> Tensor:
        inputs = self._inputs
        row_ids = inputs.logit_row_ids[: inputs.padded(inputs.num_logit_rows)]
        return self._model.logits(self._ops, self._hidden, row_ids)

    def drawn(self, logits: Tensor) -> Tensor:
        return self._drawn(logits, self._inputs.logit_row_ids[: logits.shape[0]])

    def _drawn(self, logits: Tensor, row_ids: Tensor) -> Tensor:
        inputs, drawing = self._inputs, self._ops.drawing
        assert drawing is not None or inputs.layers is not None, "the host samples"
        drawn = None if drawing is None else drawing.run(inputs, logits)
        return drawn if inputs.layers is None else inputs.layers.with_read_tokens(drawn, row_ids)
