"""Modules filled with values for tests: `pack(k, module, weight=...)`."""

from __future__ import annotations

from functools import partial

import numpy as np

from ops.modules import Module
from ops.table import OpTable
from ops.weight_format import Memory, QuantizedWeight


def pack(k: OpTable, module: Module, **values: np.ndarray | QuantizedWeight | None) -> None:
    """Pack tensors named as in `OpTable.pack`; None is left out."""

    def give(value: np.ndarray | QuantizedWeight) -> np.ndarray | QuantizedWeight:
        return value

    k.pack(module, {name: partial(give, value) for name, value in values.items() if value is not None}, Memory())
