"""A model run op by op, with whatever table the device offers.

Made by `execution.make_plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ops.modules import KvCache, Tensor
from ops.table import OpTable
from workers.models import Model
from workers.step.inputs import StepInputs


class EagerPlan:
    failed_sizes: Collection[int] = ()
    captured: Mapping[int, object] = {}

    def __init__(self, model: Model, ops: OpTable, inputs: StepInputs, cache: KvCache) -> None:
        self._model = model
        self._ops = ops
        self._inputs = inputs
        self._cache = cache

    def replay(self, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        self._run()

    def _run(self) -> None:
        self._hidden = self._model.forward(self._ops, self._inputs, self._cache)

    def forget(self) -> None:
        """Nothing was captured."""

    def hidden(self) -> np.ndarray:
        return np.asarray(self._hidden.numpy())

    @property
    def hidden_there(self) -> Tensor:
        """As `hidden`, where the device has it."""
        return self._hidden

    def logits(self) -> Tensor:
        inputs = self._inputs
        row_ids = inputs.logit_row_ids[: inputs.padded(inputs.num_logit_rows)]
        return self._model.logits(self._ops, self._hidden, row_ids)

    def drawn(self, logits: Tensor) -> Tensor:
        if self._inputs.layers is None:
            assert self._ops.drawing is not None, "the host draws"
            return self._ops.drawing.run(self._inputs, logits)
        from ops.paddle.layer_rows import with_read_tokens  # with Paddle's table, as the device has imported

        drawing = self._ops.drawing
        return with_read_tokens(self._inputs, logits, None if drawing is None else drawing.run(self._inputs, logits))
