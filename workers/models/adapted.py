"""Linears that adapters may change. Used by the models, where rows of a step go through one."""

from __future__ import annotations

from typing import Any

from ops.modules import Linear, Tensor
from ops.table import OpTable


def linear(ops: OpTable, step: Any, x: Tensor, module: Linear) -> Tensor:
    """`module` of x, the rows of `step` (or of its inputs, which are all its rows), with what their adapters add."""
    y = ops.linear(x, module)
    return y if module.adapters is None else ops.adapt(step, y, x, module)
