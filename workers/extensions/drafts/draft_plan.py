"""How MTP layers run: like the trunk's plans (`workers/engine/plan.py`), for two kinds of rows over the same cache.

Made by the drafter for each load of weights, where the host makes the inputs; otherwise `device_draft_plan.py` runs them.
`store` takes accepted tokens and only writes their keys and values. `forward` takes the last token of each sequence and drafts
the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ops import _cpu
from ops.cpu.array import Array, address_of
from ops.cpu.executors import Recording, Tape
from ops.cpu.rank_group import RankGroup
from ops.cpu.table import make_table
from ops.modules import KvCache, Tensor
from ops.table import NUM_LOGIT_ROWS, NUM_ROWS, NUM_SEQUENCES, Inputs, OpTable
from workers.devices.device import Device
from workers.engine.plan import telling
from workers.engine.rows import StepRows
from workers.extensions.drafts.draft_inputs import DraftInputs
from workers.models.llama import DraftLayer


class DraftPlan(Protocol):
    """Modules bound to the inputs of both kinds of rows."""

    num_modules: int
    num_failed: int  # graphs that could not be captured and run op by op

    def store(self, size: int = 0) -> None:
        """Write entries of the accepted rows in every module's layer. `size`: replay the graph captured for this many padded
        rows; 0: the actual rows."""

    def forward(self, module: int, size: int = 0) -> None:
        """Draft with one of the modules, which also writes entries of the rows in the layers of the others. `size`: as for
        `Plan.replay`."""

    def forget(self) -> None:
        """Drop the captured graphs (`Plan.forget`)."""

    def fed(self, module: int) -> np.ndarray:
        """Return the output of the last `forward` that is the next one's input: float32 [m, hidden], m >= single.num_tokens."""

    def logits(self, module: int) -> np.ndarray:
        """Return logits of the rows that the inputs select: float32 [m, vocab]. Valid until the next call of any method."""


def make_draft_plan(
    name: str,
    modules: Sequence[DraftLayer],
    device: Device,
    accepted: DraftInputs,
    single: DraftInputs,
    cache: KvCache,
    on_op: Callable[[], None] = lambda: None,
    rank_group: RankGroup | None = None,
    sizes: tuple[int, ...] = (),
) -> DraftPlan:
    """Make the plan of MTP layers, as `make_plan` does for the model; `sizes` of single rows."""
    ops = device.ops
    if name != "eager" and ops.name == "native":
        return TapeDraftPlan(modules, accepted, single, cache, rank_group, sizes)
    return EagerDraftPlan(modules, telling(ops, on_op), accepted, single, cache)


def store_entries(ops: OpTable, modules: Sequence[DraftLayer], inputs: Inputs, hidden: Tensor, cache: KvCache) -> None:
    """Write entries in every module's layer."""
    ops.begin(inputs, cache)
    for module in modules:
        module.store(ops, inputs, hidden, cache)


def draft_of(
    ops: OpTable, modules: Sequence[DraftLayer], index: int, inputs: Inputs, hidden: Tensor, cache: KvCache
) -> tuple[Tensor, Tensor]:
    """Run module `index`, and write entries in the layers of the others; return the input of its head and the input of the next
    draft."""
    if len(modules) > 1:
        store_entries(ops, [module for other, module in enumerate(modules) if other != index], inputs, hidden, cache)
    return modules[index].forward(ops, inputs, hidden, cache)


class EagerDraftPlan:
    """Plan that runs op by op."""

    def __init__(
        self, modules: Sequence[DraftLayer], ops: OpTable, accepted: DraftInputs, single: DraftInputs, cache: KvCache
    ) -> None:
        self.num_modules, self.num_failed = len(modules), 0
        self._modules, self._ops, self._cache = modules, ops, cache
        self._accepted, self._single = accepted, single

    def store(self, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        inputs = self._accepted
        store_entries(self._ops, self._modules, inputs, inputs.hidden[: inputs.num_rows], self._cache)

    def forward(self, module: int, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        inputs = self._single
        hidden = inputs.hidden[: inputs.num_rows]
        self._read, self._fed = draft_of(self._ops, self._modules, module, inputs, hidden, self._cache)

    def forget(self) -> None:
        """Do nothing: nothing was captured."""

    def fed(self, module: int) -> np.ndarray:
        return np.asarray(self._fed.numpy())

    def logits(self, module: int) -> np.ndarray:
        inputs = self._single
        row_ids = inputs.logit_row_ids[: inputs.padded(inputs.num_logit_rows)]
        return np.asarray(self._modules[module].logits(self._ops, self._read, row_ids).numpy())


class TapeDraftPlan:
    """Plan with a tape for accepted rows, and per module two tapes for single rows, like `TapePlan`, plus those of captured
    sizes, like `CapturedPlan`."""

    def __init__(
        self,
        modules: Sequence[DraftLayer],
        accepted: DraftInputs,
        single: DraftInputs,
        cache: KvCache,
        rank_group: RankGroup | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.num_modules, self.num_failed = len(modules), 0
        self._single = single
        recording = Recording(rank_group)
        store_entries(make_table(recording), modules, accepted, _hidden(recording, accepted), cache)
        self._store = recording.finish()
        self._tapes = []
        self._captured: dict[tuple[int, int], tuple[Tape, tuple[Array, Array]]] = {}
        for index, module in enumerate(modules):
            forward, (read, fed) = _forward(modules, index, single, cache, Recording(rank_group))
            for size in sizes:
                recording = Recording(rank_group, {NUM_ROWS: size, NUM_SEQUENCES: single.padded_sequences(size)})
                self._captured[index, size] = _forward(modules, index, single, cache, recording)
            recording = Recording(rank_group)
            rows = recording.rows(single.host_counts, NUM_LOGIT_ROWS, single.max_logit_rows)
            logits = module.logits(make_table(recording), read, Array(rows, 1, address_of(single.logit_row_ids)))
            self._tapes.append((forward, read, fed, recording.finish(logits), logits))

    def tapes(self) -> tuple[_cpu.Tape, list[tuple[_cpu.Tape, _cpu.Tape, int, int, int]]]:
        """Return the tape of accepted rows, and per module the tapes of single rows up to the next draft's input and up to the
        logits, the addresses of both, and the width of the logits."""
        modules = [
            (forward.native, head.native, fed.address, logits.address, logits.width)
            for forward, _, fed, head, logits in self._tapes
        ]
        return self._store.native, modules

    def chain(self, layers: _cpu.LayerDrafts, rows: StepRows) -> None:
        """Make all draft tokens of a step's rows; `layers` has the tapes."""
        layers.draft(*rows.addresses())

    def forget(self) -> None:
        """Do nothing: tapes stay valid."""

    def store(self, size: int = 0) -> None:
        assert not size, f"{size} rows were never captured"
        self._store.replay()

    def forward(self, module: int, size: int = 0) -> None:
        forward, *results = self._tapes[module][:3]
        if not size:
            forward.replay()
            return
        assert self._single.num_rows == size, f"{self._single.num_rows} rows do not fit a graph captured with {size}"
        captured, found = self._captured[module, size]
        captured.replay()
        count = self._single.num_tokens  # only real rows are read
        for result, of_size in zip(results, found, strict=True):
            result.numpy()[:count] = of_size.numpy()[:count]

    def fed(self, module: int) -> np.ndarray:
        fed: np.ndarray = self._tapes[module][2].numpy()
        return fed

    def logits(self, module: int) -> np.ndarray:
        *_, tape, logits = self._tapes[module]
        tape.replay()
        found: np.ndarray = logits.numpy()
        return found


def _forward(
    modules: Sequence[DraftLayer], index: int, single: DraftInputs, cache: KvCache, recording: Recording
) -> tuple[Tape, tuple[Array, Array]]:
    """Record one draft token of a module; return the tape, the input of its head and the input of the next draft."""
    hidden = _hidden(recording, single)
    read, fed = draft_of(make_table(recording), modules, index, single, hidden, cache)
    return recording.finish(read, fed), (read, fed)


def _hidden(recording: Recording, inputs: DraftInputs) -> Array:
    """Return the hidden states of the inputs, for the actual number of rows."""
    rows = recording.rows(inputs.host_counts, NUM_ROWS, inputs.max_rows)
    return Array(rows, inputs.host_hidden.shape[1], address_of(inputs.hidden))
