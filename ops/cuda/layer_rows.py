"""Rows of draft layers on a card (`ops/layer_rows.py`), by the kernels of `drafts.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ops.cuda.array import CudaArray
from ops.cuda.operands import TYPES
from ops.layer_rows import OF_DRAFTS, DeviceStep, LayerRows, LayerSizes, counts_of
from ops.modules import Tensor
from ops.table import Inputs

_STATE = 4  # column


class CudaLayerMemory:
    """`LayerMemory` of arrays; hidden states have the type of activations."""

    def __init__(
        self,
        run: Callable[..., dict[str, CudaArray]],
        make: Callable[..., CudaArray],
        zeros: Callable[[int], CudaArray],
        floats: Callable[[Tensor], CudaArray],
        step: DeviceStep,
        columns: CudaArray,
        sizes: LayerSizes,
    ) -> None:
        """`run`: a row of the library; `make`: an array of a shape and type; `zeros`: so many hidden states; `floats`: an array
        in float32."""
        self._run, self._make, self._floats, self._step = run, make, floats, step
        self.columns, self.sizes = columns, sizes
        self.states = zeros((step.sizes.num_slots + 1) * sizes.group)
        self.fed, self.kept = zeros(sizes.max_drafted), zeros(sizes.max_kept)
        self._type = TYPES[self.states.dtype]

    @property
    def _drafts(self) -> dict[str, Any]:
        """Return `Drafts` of operands.h."""
        sizes = self._step.sizes
        return {
            "columns": self.columns,
            "slots": self._step.slots,
            "max_drafted": self.sizes.max_drafted,
            "num_slots": sizes.num_slots,
            "num_positions": sizes.num_positions,
            "num_blocks": sizes.num_blocks,
        }

    def keep_hidden(self, hidden: CudaArray) -> None:
        self._copy(hidden, self.kept)

    def put_fed(self, fed: CudaArray) -> None:
        self._copy(fed, self.fed)

    def with_read_tokens(self, drawn: CudaArray | None, row_ids: CudaArray) -> CudaArray:
        step = self._step
        return self._run(
            "ReadTokens",
            drawn=drawn,
            row_ids=row_ids,
            kept_row_ids=step.kept.row_ids,
            token_ids=step.token_ids,
            num_rows=row_ids.shape[0],
            num_lines=0 if drawn is None else drawn.shape[0],
        )["lines"]

    def rows_of_draft(self, number: int, num_rows: int, num_key_splits: int) -> tuple[Inputs, CudaArray]:
        if number == 0:
            self._run("WriteSent", sent=self._step.sent, slots=self._step.slots, num_slots=self._step.sizes.num_slots)
        made = self._run("DraftRows", drafts=self._drafts, number=number, num_rows=num_rows)
        first = _STATE * self.sizes.max_drafted
        hidden = self.fed[:num_rows] if number else self._states(self.columns[first : first + num_rows])
        return self._rows(made, num_key_splits), hidden

    def put_draft(self, number: int, part: slice, logits: Tensor) -> None:
        num_rows, vocab = logits.shape
        given = {"drafts": self._drafts, "logits": self._floats(logits), "num_rows": num_rows, "vocab": vocab}
        self._run("PutDraft", **given, first=part.start, number=number)

    def rows_of_entries(self, kept_hidden: CudaArray) -> tuple[Inputs, CudaArray]:
        step, (num_rows, width) = self._step, kept_hidden.shape
        given = {
            "type": self._type,
            "hidden": kept_hidden,
            "states": self.states,
            "columns": self.columns[OF_DRAFTS * self.sizes.max_drafted :],
            "sequence_offsets": step.kept.sequence_offsets,
            "num_rows": num_rows,
            "width": width,
            "num_slots": step.sizes.num_slots,
            "group": self.sizes.group,
        }
        of_step = {"token_ids": step.token_ids, "positions": step.positions, "row_slots": step.row_slots}
        made = self._run("EntryRows", **given, row_ids=step.kept.row_ids, **of_step)
        self._run("KeepStates", **given)  # after all rows have read theirs
        return self._rows(made, 1), made["before"]

    def draft_tokens(self, num_rows: int, count: int) -> CudaArray:
        return self._run("DraftTokens", drafts=self._drafts, num_rows=num_rows, count=count)["tokens"]

    def _states(self, ids: CudaArray) -> CudaArray:
        width = self.sizes.hidden_size
        return self._run("TakeRows", type=self._type, x=self.states, ids=ids, num_rows=ids.shape[0], width=width)["y"]

    def _copy(self, x: Tensor, to: CudaArray) -> None:
        assert x.dtype == to.dtype, f"hidden states are {x.dtype}, expected {to.dtype}"
        rows, width = x.shape
        whole = {"num_rows": rows, "width": width, "first": 0, "count": width, "width_of_y": width, "first_of_y": 0}
        self._run("CopyColumns", type=self._type, x=x, y=to, **whole)

    def _rows(self, made: dict[str, CudaArray], num_key_splits: int) -> Inputs:
        step = self._step
        token_ids, positions, row_slots, first_keys, contexts = (made["rows"][line] for line in range(5))
        num_rows = len(positions)
        mappings = [self._make([num_rows], "int32") for _ in step.block_tables]
        arrays = token_ids, positions, row_slots, mappings, first_keys, contexts, step.numbers[:num_rows]
        return cast(Inputs, LayerRows(num_rows, num_key_splits, step.block_tables, *arrays, counts_of(num_rows)))
