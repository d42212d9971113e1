"""Linears that adapters may change. Used by the models for the rows of a step."""

from __future__ import annotations

from typing import Any

from ops.modules import Linear, Tensor
from ops.table import OpTable


def linear(ops: OpTable, step: Any, x: Tensor, module: Linear) -> Tensor:
    """Apply `module` to x, the rows of `step`, and add what their adapters compute."""
    y = ops.linear(x, module)
    return y if module.adapters is None else ops.adapt(step, y, x, module)
