"""MTP layers on a device: draft tokens that never leave it, and entries of rows while their tokens are still in flight.

Made by the drafter (`device_mtp.py`) for each load of weights. Runs op by op, or as graphs of padded rows that are captured at
their first run: one graph per draft token of a row, and one for the entries made from the trunk's graph of the same size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ops.layer_rows import LayerMemory
from ops.modules import KvCache, Tensor
from ops.table import OpTable
from workers.devices.capabilities import DeviceError
from workers.devices.device import Device
from workers.devices.enqueued import Graph
from workers.engine.device_inputs import DeviceInputs
from workers.engine.graph_memory import GraphMemory
from workers.extensions.drafts.draft_plan import draft_of, store_entries
from workers.models.llama import DraftLayer

_LOG = logging.getLogger(__name__)
ENTRIES = -1  # used instead of the number of a draft token
_GRAPHS = 1  # a group of their own, because they run between a step of the trunk and the last use of its results


class _Captured(msgspec.Struct, frozen=True):
    """A graph and the addresses of everything that it reads and writes."""

    graph: Graph
    addresses: tuple[int, ...]


class DeviceDraftPlan:
    def __init__(
        self,
        modules: Sequence[DraftLayer],
        device: Device,
        ops: OpTable,
        memory: LayerMemory,
        step: DeviceInputs,
        cache: KvCache,
        max_logit_rows: int,
    ) -> None:
        self.num_failed = 0  # graphs that could not be captured and run op by op
        self._modules, self._device, self._ops, self._memory, self._cache = modules, device, ops, memory, cache
        self._sync_free_ops, self._max_sync_free_rows = (
            ops.sync_free(),
            memory.sizes.max_drafted * memory.sizes.group,
        )  # for decoding rows
        self._max_logit_rows = max_logit_rows
        # by draft token number (or ENTRIES) and size; None: capturing failed
        self._captured: dict[tuple[int, int], _Captured | None] = {}
        own = {"columns": memory.columns, "states": memory.states, "fed": memory.fed, "kept": memory.kept}
        parts = {"cache": cache.layers, "weights": [module.parts() for module in modules], "layers": own}
        self._places = GraphMemory(device, {"": step, "kept.": step.kept}, **parts)

    def draft(self, number: int, num_rows: int, num_key_splits: int, size: int = 0) -> None:
        """Write draft token `number` of the first `num_rows` rows, which get that many. `size`: replay the graph captured for
        this many padded rows; 0: run op by op."""
        self._run(number, num_rows, size, lambda ops: self._draft(ops, number, num_rows, num_key_splits))

    def store(self, hidden: Tensor, size: int = 0) -> None:
        """Write entries of the step's kept rows from their `hidden` states [m, hidden], and keep the last one of each. `size`:
        replay the graph of this size on the hidden states of the trunk's graph; 0: run op by op."""
        kept = self._memory.kept[: hidden.shape[0]] if size else hidden
        self._run(ENTRIES, kept.shape[0], size, lambda ops: self._store(ops, kept))

    def draft_tokens(self, num_rows: int, count: int) -> np.ndarray:
        """Return the first `count` draft tokens of each row, int32 [rows, count]; wait for them."""
        return self._device.fetch("draft_tokens", self._memory.draft_tokens(num_rows, count)).wait()

    def forget(self) -> None:
        """Drop the captured graphs (`Plan.forget`)."""
        self._captured.clear()
        self.num_failed = 0

    def _draft(self, ops: OpTable, number: int, num_rows: int, num_key_splits: int) -> None:
        rows, hidden = self._memory.rows_of_draft(number, num_rows, num_key_splits)
        module = number % len(self._modules)
        read, fed = draft_of(ops, self._modules, module, rows, hidden, self._cache)
        for begin in range(0, num_rows, self._max_logit_rows):
            part = slice(begin, min(begin + self._max_logit_rows, num_rows))
            self._memory.put_draft(number, part, self._modules[module].logits(ops, read, rows.tile_row_ids[part]))
        self._memory.put_fed(fed)

    def _store(self, ops: OpTable, hidden: Tensor) -> None:
        rows, before = self._memory.rows_of_entries(hidden)
        store_entries(ops, self._modules, rows, before, self._cache)

    def _run(self, of: int, num_rows: int, size: int, work: Callable[[OpTable], None]) -> None:
        """Replay the graph, capturing it first if needed; run op by op if that fails."""
        if size and (of, size) not in self._captured:
            self._captured[of, size] = self._capture(size, work)
        found = self._captured.get((of, size))
        if found is None:
            work(self._sync_free_ops if num_rows <= self._max_sync_free_rows else self._ops)
            return
        self._places.check(f"{size} rows of draft layers", found.addresses)
        found.graph.replay()

    def _capture(self, size: int, work: Callable[[OpTable], None]) -> _Captured | None:
        try:
            graph = self._device.capture(lambda: work(self._sync_free_ops), _GRAPHS)
        except DeviceError as error:
            self.num_failed += 1
            _LOG.warning("%d rows of draft layers run op by op, because capturing failed: %s", size, error)
            return None
        return _Captured(graph, self._places.addresses())
