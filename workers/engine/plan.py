"""Plans: a model bound to its inputs and cache, replayed once per step.

Made by the runner for each load of weights. `EagerPlan` (eager_plan.py) calls op by op, with any table. `TapePlan`
(tape_plan.py) records the model once with the native table and replays the tape in one native call. `CapturedPlan`
(captured_plan.py) has further tapes of fixed sizes, and `GraphPlan` (graph_plan.py) has graphs of a device. The contents of the
inputs change between replays, their addresses never, and the numbers of rows are read from the inputs: one tape serves prefill,
decode and mixed steps.
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
    """Model bound to inputs and cache."""

    failed_sizes: Collection[int]  # sizes that could not be captured and run op by op

    @property
    def tape(self) -> Tape | None:
        """Return the tape that `replay(0)` replays; None: ops run one by one."""

    @property
    def captured(self) -> Collection[int]:
        """Return the captured sizes."""

    def replay(self, size: int = 0) -> None:
        """Run the step in the inputs, up to the hidden states of the kept rows. `size`: replay the capture of this many padded
        rows; 0: run the actual rows."""

    def forget(self) -> None:
        """Drop the captures of a device. Each is captured again at its next run."""

    def hidden(self) -> np.ndarray:
        """Return hidden states of the kept rows of the last step, float32 [m, hidden], m >= inputs.kept.num_tokens; valid until
        the next `replay`."""

    def logits(self) -> Tensor:
        """Return logits of the kept rows that the inputs select, of the last step: float32 [m, vocab], m >=
        inputs.num_logit_rows; valid until the next call of either."""

    def drawn(self, logits: Tensor) -> Tensor:
        """Sample on the device from the `logits` of this step, like `DeviceSampler.run` of its ops. With MTP layers on the
        device there is one more line, the only one if nothing is sampled: the tokens that these rows read, including draft
        tokens. A captured step may have padded rows at the end. Valid until the next call of either."""


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
    """Make the plan "tape", "captured" with these `sizes`, or "eager". Native ops are captured as tapes, others as graphs of
    the device. `on_op` is called after each op of a table that is not native; native ones report progress themselves
    (`ops/cpu/progress.py`). `rank_group`: of the table. `max_sync_free_rows`: as for `EagerPlan`."""
    ops = device.ops
    if ops.name == "native" and name == "captured":
        return CapturedPlan(model, inputs, cache, rank_group, sizes)
    if ops.name == "native" and name == "tape":
        return TapePlan(model, inputs, cache, rank_group)
    if name == "captured":
        return GraphPlan(model, device, telling(ops, on_op), inputs, cache, max_sync_free_rows)
    return EagerPlan(model, telling(ops, on_op), inputs, cache, max_sync_free_rows)


def telling(ops: OpTable, on_op: Callable[[], None]) -> OpTable:
    """Return the same ops with `on_op` called after each one; native ops report progress themselves (`ops/cpu/progress.py`)."""
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
