"""A model as graphs of its device, one per captured size; steps that fit no size run op by op.

Made by `plan.make_plan`. A size is captured at its first run, which happens when weights are loaded, largest first. The copy to
the device precedes the graph, which contains the metadata of the step, the model, and logits of the first kept rows. A graph
uses the addresses that it was captured with. Each replay compares those of inputs, cache and weights with the present ones, and
a difference is an error that names the tensor, because the answer would be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec
import numpy as np

from ops.modules import KvCache, Tensor
from ops.table import HAS_BOUNDS, OpTable
from workers.devices.capabilities import DeviceError
from workers.devices.device import Device
from workers.devices.enqueued import Graph
from workers.engine.eager_plan import EagerPlan
from workers.engine.graph_memory import GraphMemory
from workers.engine.inputs import StepInputs
from workers.models import Model

_LOG = logging.getLogger(__name__)


class Captured(msgspec.Struct, frozen=True):
    """A graph, its results, and the addresses of everything that it reads and writes."""

    graph: Graph
    written: dict[str, Tensor]
    num_logit_rows: int
    addresses: tuple[int, ...]


class GraphPlan(EagerPlan):
    def __init__(
        self, model: Model, device: Device, ops: OpTable, inputs: StepInputs, cache: KvCache, max_sync_free_rows: int = 0
    ) -> None:
        super().__init__(model, ops, inputs, cache, max_sync_free_rows)
        self._device = device
        self.captured: dict[int, Captured] = {}
        self.failed_sizes: Collection[int] = ()
        self._replayed: Captured | None = None  # in the last step
        self._memory = GraphMemory(device, {"": inputs, "kept.": inputs.kept}, cache=cache.layers, weights=model)

    def replay(self, size: int = 0) -> None:
        self._replayed = None
        if size and size not in self.captured and size not in self.failed_sizes:
            self._capture(size)
        if size not in self.captured:
            self._run()
            return
        assert not self._inputs.host_counts[HAS_BOUNDS], "no graph reads bounds of keys"
        found = self._replayed = self.captured[size]
        self._memory.check(f"{size} rows", found.addresses)
        found.graph.replay()
        self._hidden = found.written["hidden"]

    def forget(self) -> None:
        self.captured.clear()
        self.failed_sizes, self._replayed = (), None

    def logits(self) -> Tensor:
        found = self._found()
        if found is not None:
            return found.written["logits"][: self._inputs.padded(self._inputs.num_logit_rows)]
        return super().logits()

    def drawn(self, logits: Tensor) -> Tensor:
        found = self._found()
        return super().drawn(logits) if found is None else found.written["drawn"]

    def _found(self) -> Captured | None:
        """Return the replayed graph if it computed the logits that are needed."""
        inputs, found = self._inputs, self._replayed
        is_in_it = found is not None and inputs.num_logit_rows <= found.num_logit_rows and inputs.has_first_logit_rows
        return found if is_in_it else None

    def _capture(self, size: int) -> None:
        inputs = self._inputs
        num_rows = min(size, inputs.max_logit_rows)
        inputs.set_logit_rows(np.arange(num_rows))
        row_ids = inputs.logit_row_ids[: inputs.padded(num_rows)]
        written: dict[str, Tensor] = {}
        ops = self._sync_free_ops

        def run() -> None:
            self._hidden = self._model.forward(ops, inputs, self._cache)
            written["hidden"] = self._hidden
            if inputs.layers is not None:
                inputs.layers.keep_hidden(self._hidden)
            if self._model.head is not None:
                written["logits"] = self._model.logits(ops, self._hidden, row_ids)
                if self._ops.drawing is not None or inputs.layers is not None:
                    written["drawn"] = self._drawn(written["logits"], row_ids)

        try:
            graph = self._device.capture(run)
        except DeviceError as error:
            self.failed_sizes = {*self.failed_sizes, size}
            _LOG.warning("steps of %d rows run op by op, because capturing failed: %s", size, error)
            return
        self.captured[size] = Captured(graph, written, num_rows, self._memory.addresses())
