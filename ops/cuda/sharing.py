"""Experts that ranks share, each with a card of its own: rows go to the ranks that compute them, and results come back, through
memory that the ranks lend each other.

Used by the table (`table.py`). Kernels are in `exchange.cu`; `workers/devices/cuda/windows.py` lends the memory. Each rank
computes some experts for the rows of all; the rank of a row adds the results in the order of its choices, so the bits do not
depend on where an expert is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from ops.cuda.array import DTYPES, CardMemory, CudaArray
from ops.cuda.operands import TYPES
from ops.modules import Experts
from ops.table import Inputs, Routing, StepInputs

_LINE_BYTES = 64  # LINE_BYTES in exchange.cu


class Windows(NamedTuple):
    """Memory that ranks lend each other, as `Windows` of operands.h."""

    addresses: CudaArray  # uint8 [8 * ranks]
    epoch: np.ndarray  # int32 [1] of the group, in memory that all ranks share
    place: int  # of this rank
    num_ranks: int
    own: int  # address of this rank's
    num_bytes: int  # of each rank's

    def operands(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("addresses", "epoch", "place", "num_ranks")}


class OfferLayout(NamedTuple):
    """Places in lent memory, in bytes (`Offer` of operands.h), for at most `max_rows` rows of each rank."""

    max_rows: int
    num_same: int  # ranks of a replica, which have the same rows
    adapters_at: int
    rows_at: int
    results_at: int
    num_bytes: int

    @staticmethod
    def of(max_rows: int, num_same: int, num_chosen: int, width: int, dtype: str) -> OfferLayout:
        of_row, num_choices = width * DTYPES[dtype].itemsize, max_rows * num_chosen
        places = [_LINE_BYTES]
        for num_bytes in (4 * num_choices, 4 * max_rows, max_rows * of_row, num_same * num_choices * of_row):
            places.append(-(-(places[-1] + num_bytes) // _LINE_BYTES) * _LINE_BYTES)
        assert places[3] < 1 << 31, f"{max_rows} rows of {of_row} bytes exceed the limit of 2 GiB that a rank can send"
        return OfferLayout(max_rows, num_same, *places[1:])


class SharedMemory(NamedTuple):
    """Lent memory of ranks that share experts. `gather`: returns the values (int64 [n]) of each rank: [ranks, n]."""

    windows: Windows
    layout: OfferLayout
    gather: Callable[[np.ndarray], np.ndarray]

    def offer(self) -> dict[str, Any]:
        names = ("adapters_at", "rows_at", "results_at", "num_same")
        return {"windows": self.windows.operands(), **{name: getattr(self.layout, name) for name in names}}


class Taken(NamedTuple):
    """Rows of all ranks, of which this one computes the choices in `routing` (-1: none)."""

    rows: CudaArray
    routing: Routing
    num_rows: int  # of this rank itself
    most_rows: int  # that a rank sends


class SharedExperts:
    """The exchange of the ranks that lend `memory()`. `run`: runs a row of `operands.h` and returns its results."""

    def __init__(
        self, memory: Callable[[], SharedMemory], run: Callable[..., dict[str, CudaArray]], of_card: CardMemory, dtype: str
    ) -> None:
        self._memory, self._run, self._of_card, self._dtype = memory, run, of_card, dtype
        self._inputs: Inputs | None = None
        self._has_kept = False  # whether only the step's kept rows go on
        self._most: np.ndarray | None = None  # rows that a rank sends: of all rows, and of those kept; None: not known yet

    def begin(self, inputs: Inputs) -> None:
        self._inputs, self._has_kept, self._most = inputs, False, None

    def keep_rows(self) -> None:
        self._has_kept = True

    def take(self, x: CudaArray, routing: Routing, module: Experts, *, are_alike: bool) -> Taken:
        """Send this rank's rows `x` [R, width] and take those that it computes. `are_alike`: every rank has as many rows, as in
        captured steps; otherwise the ranks tell each other once in a step, on the host."""
        memory, (num_rows, num_chosen) = self._memory(), routing.ids.shape
        layout, rank = memory.layout, memory.windows.place % memory.layout.num_same
        first, end = (num_rows * place // layout.num_same for place in (rank, rank + 1))
        most_rows = -(-num_rows // layout.num_same) if are_alike else self._most_rows(memory)
        assert end - first <= most_rows <= layout.max_rows, f"{end - first} of {most_rows} rows, limit {layout.max_rows}"
        made = self._run(
            "ShareRows",
            type=TYPES[self._dtype],
            offer=memory.offer(),
            x=x,
            ids=routing.ids,
            slots_of_rows=None if module.adapters is None else routing.adapter_slots,
            owners=module.owners,
            counts=module.counts,
            num_rows=num_rows,
            width=module.num_inputs,
            num_chosen=num_chosen,
            num_experts=module.num_experts,
            first=first,
            num_sent=end - first,
            most_rows=most_rows,
        )
        return Taken(made["rows"], Routing(made["own_ids"], None, made["own_slots"]), num_rows, most_rows)

    def results(self, computed: CudaArray, taken: Taken) -> CudaArray:
        """Return the results of all choices of this rank's rows, [R, chosen, width], from those that the ranks computed. They
        are valid until the next exchange."""
        memory, width, num_chosen = self._memory(), computed.shape[1], taken.routing.ids.shape[1]
        self._run(
            "ReturnResults",
            type=TYPES[self._dtype],
            offer=memory.offer(),
            results=computed,
            own_ids=taken.routing.ids,
            width=width,
            num_chosen=num_chosen,
            most_rows=taken.most_rows,
        )
        shape = [taken.num_rows, num_chosen, width]
        return CudaArray(self._of_card, memory.windows.own + memory.layout.results_at, shape, self._dtype, None)

    def _most_rows(self, memory: SharedMemory) -> int:
        if self._most is None:
            inputs = cast(StepInputs, self._inputs)
            own = np.array([inputs.num_rows, inputs.kept.num_rows], np.int64)
            self._most = -(-memory.gather(own).max(axis=0) // memory.layout.num_same)
        return int(self._most[int(self._has_kept)])
