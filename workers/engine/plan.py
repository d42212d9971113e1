"""How a model is run: a plan is a model bound to its inputs and cache, replayed once a step.

Made by the runner (anew for new weights). `EagerPlan` (eager_plan.py) calls op by op, with any table; `TapePlan` (tape_plan.py)
has the native table record the model once and replays the record in one native call; `CapturedPlan` (captured_plan.py) has
further records of fixed sizes, and `GraphPlan` (graph_plan.py) has them as graphs of a device.
Contents of the inputs change between replays, addresses never, and the numbers of rows are read from the inputs: one tape
serves prefill, decode and mixed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec
import numpy as np

from ops.cpu.executors import Tape
from ops.cpu.rank_group import RankGroup
from ops.modules import KvCache, Tensor
from ops.table import OpTable
from workers.devices.device import Device
from workers.engine.captured_plan import CapturedPlan
from workers.engine.eager_plan import EagerPlan
from workers.engine.graph_plan import GraphPlan
from workers.engine.inputs import StepInputs
from workers.engine.tape_plan import TapePlan
from workers.models import Model


class Plan(Protocol):
    """A bound model."""

    failed_sizes: Collection[int]  # that could not be captured, and are run op by op

    @property
    def tape(self) -> Tape | None:
        """The record that `replay(0)` replays; None: it runs ops one by one."""

    @property
    def captured(self) -> Collection[int]:
        """The sizes that were."""

    def replay(self, size: int = 0) -> None:
        """Run the step that the inputs hold, up to the hidden states of the rows that are kept. `size`: as it was captured for
        so many rows, to which the inputs are padded; 0: with the rows that there are."""

    def forget(self) -> None:
        """Drop the captures of a device. Each is captured again when it is run."""

    def hidden(self) -> np.ndarray:
        """The hidden states of the kept rows of the last step, float32 [m, hidden], m >= inputs.kept.num_tokens; until the next
        `replay`."""

    def logits(self) -> Tensor:
        """Logits of the kept rows that the inputs want, of the step that was replayed last: float32 [m, vocab],
        m >= inputs.num_logit_rows, valid until the next call of either."""

    def drawn(self, logits: Tensor) -> Tensor:
        """Sample on the device, as its ops' `DeviceSampler.run` does, from the `logits` of this step. With draft layers on the
        device there is one line more (the only one where it samples nothing): the tokens that these rows had read, draft
        tokens among them. Once more rows at the end where it was captured with more. Valid until the next
        call of either."""


def make_plan(
    name: str,
    model: Model,
    device: Device,
    inputs: StepInputs,
    cache: KvCache,
    on_op: Callable[[], None] = lambda: None,
    rank_group: RankGroup | None = None,
    sizes: tuple[int, ...] = (),
    max_sync_free_rows: int = 0,
) -> Plan:
    """The plan "tape" or "captured" with these `sizes`, or "eager". Native ops are captured as tapes, others as graphs of the
    device. `on_op` is called after each op of a table that is not native: native ones say by themselves that they get on
    (`ops/cpu/progress.py`). `rank_group`: as the table has it. `max_sync_free_rows`: as in `EagerPlan`."""
    ops = device.ops
    if ops.name == "native" and name == "captured":
        return CapturedPlan(model, inputs, cache, rank_group, sizes)
    if ops.name == "native" and name == "tape":
        return TapePlan(model, inputs, cache, rank_group)
    if name == "captured":
        return GraphPlan(model, device, telling(ops, on_op), inputs, cache, max_sync_free_rows)
    return EagerPlan(model, telling(ops, on_op), inputs, cache, max_sync_free_rows)


def telling(ops: OpTable, on_op: Callable[[], None]) -> OpTable:
    """The same ops, those of a step followed by `on_op`; native ones say by themselves that they get on
    (`ops/cpu/progress.py`)."""
    if ops.name == "native":
        return ops

    def followed(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = op(*arguments)
            on_op()
            return result

        return call

    names = OpTable.__struct_fields__
    followers: dict[str, Any] = {name: followed(getattr(ops, name)) for name in names[names.index("begin") :]}
    return msgspec.structs.replace(ops, **followers)
