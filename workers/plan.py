"""How a model is run: a plan is a model bound to its inputs and cache, replayed once a step.

Made by the runner (anew for new weights). `EagerPlan` calls op by op, for any number of rows; plans that record a tape or a
device graph offer the same two properties: contents of the inputs change between replays, addresses never.
"""

from __future__ import annotations

from typing import Protocol

import paddle

from ops.modules import KvCache, Tensor
from ops.table import OpTable
from workers.inputs import StepInputs
from workers.models import Model


class Plan(Protocol):
    """A bound model."""

    def replay(self) -> Tensor | None:
        """Run the step that the inputs hold. Logits float32 [m, vocab], m >= inputs.num_logit_rows; None where no row wants
        any."""


class EagerPlan:
    """Op by op, with whatever table the device offers."""

    def __init__(self, model: Model, ops: OpTable, inputs: StepInputs, cache: KvCache) -> None:
        self._model = model
        self._ops = ops
        self._inputs = inputs
        self._cache = cache

    def replay(self) -> Tensor | None:
        inputs = self._inputs
        with paddle.no_grad():
            hidden = self._model.hidden(self._ops, inputs, self._cache)
            if not inputs.num_logit_rows:
                return None
            row_ids = inputs.logit_row_ids[: inputs.padded(inputs.num_logit_rows)]
            return self._model.logits(self._ops, hidden, row_ids)
