"""Sums of squares of the inputs of all linears, collected while an op table runs a model.

Used by `reading.py`, with native ops that run at once.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ops.cpu.array import Array, array_of
from ops.cpu.packing import PackedExperts
from ops.modules import Experts, Linear, Tensor
from ops.table import OpTable, Routing
from workers.weights.calibration import name_of

PRIOR_ROWS = 32  # an expert's mean squares start from those of all experts, as if they were of so many rows


class _Sums(msgspec.Struct):
    squares: np.ndarray  # float64 [inputs]
    num_rows: int = 0

    def add(self, x: np.ndarray) -> None:
        self.squares += np.square(x, dtype=np.float64).sum(axis=0)
        self.num_rows += len(x)


class Collector:
    """Mean squares of the inputs of each linear that rows went through."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._experts: dict[str, tuple[Linear, ...]] = {}  # linears of one part of a layer's experts, by the first's name

    def add(self, linear: Linear, x: np.ndarray) -> None:
        """Add rows [R, in] of a linear's input."""
        self._sums.setdefault(name_of(linear), _Sums(np.zeros(linear.num_inputs))).add(x)

    def table(self, ops: OpTable) -> OpTable:
        """Return the same ops, observed. All rows go through the last layer."""

        def linear(x: Tensor, module: Linear) -> Tensor:
            self.add(module, x.numpy())
            return ops.linear(x, module)

        def experts(x: Tensor, routing: Routing, module: Experts, activation: str, shared: Tensor | None = None) -> Tensor:
            self._add_experts(ops, x.numpy(), routing.ids.numpy(), module, activation)
            return ops.experts(x, routing, module, activation, shared)

        def keep_rows(step: Any, *tensors: Tensor) -> Any:
            return step, *tensors

        return msgspec.structs.replace(ops, linear=linear, experts=experts, keep_rows=keep_rows)

    def mean_squares(self) -> dict[str, np.ndarray]:
        """Return float32 [inputs] for each linear. Those of experts with few rows are close to the mean of all experts of
        their layer."""
        means = {name: sums.squares / sums.num_rows for name, sums in self._sums.items()}
        for linears in self._experts.values():
            own = [self._sums.get(name_of(linear), _Sums(np.zeros(linear.num_inputs))) for linear in linears]
            prior = sum(sums.squares for sums in own) / max(1, sum(sums.num_rows for sums in own)) * PRIOR_ROWS
            for linear, sums in zip(linears, own, strict=True):
                means[name_of(linear)] = (sums.squares + prior) / (sums.num_rows + PRIOR_ROWS)
        return {name: mean.astype(np.float32) for name, mean in means.items()}

    def _add_experts(self, ops: OpTable, x: np.ndarray, ids: np.ndarray, module: Experts, activation: str) -> None:
        """Add the inputs of both parts of the experts; those of the second are computed here, because the op keeps them."""
        for linears in module.parts.values():
            self._experts.setdefault(name_of(linears[0]), linears)
        for expert in np.unique(ids[ids >= 0]).tolist():
            rows = np.ascontiguousarray(x[(ids == expert).any(axis=1)])
            gate_up = ops.linear(array_of(rows), _alone(module, expert))
            activated = ops.activate_and_multiply(gate_up, activation, module.clamp)
            self.add(module.gate_up[expert], rows)
            self.add(module.down[expert], activated.numpy())


def _alone(module: Experts, expert: int) -> Linear:
    """Return the first part of an expert as a linear of its own."""
    packed: PackedExperts = module.weight

    def own(array: Array | None) -> Array | None:
        if array is None:
            return None
        assert array.owner is not None, "packed weights have memory"
        return array_of(array.owner.reshape(module.num_experts, -1)[expert])

    of_all, linear = packed.gate_up, module.gate_up[expert]
    values = own(of_all.values)
    assert values is not None
    weight = msgspec.structs.replace(
        of_all,
        values=values,
        scales=own(of_all.scales),
        multipliers=own(of_all.multipliers),
        offsets=own(of_all.offsets),
        bias=None,
    )
    return Linear(
        linear.names,
        linear.num_inputs,
        linear.num_outputs,
        module.has_bias,
        linear.format,
        weight=weight,
        bias=own(of_all.bias),
    )
