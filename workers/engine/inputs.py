"""Inputs of one step on the device: metadata in tensors that are allocated once and never move.

Owned by the runner, which fills it from a Step; read by the ops (`ops.table.Inputs`). `set_rows` writes every tensor to its
full length, so that nothing remains of a longer earlier step, and before any op of the step runs. `row_inputs.py` describes the
layout of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from engine.checkpoint.comm_spec import max_rows
from ops.modules import Tensor
from ops.table import KEY_SPLIT, ROW_TILE
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.row_inputs import KeptRows, Room, RowInputs


class InputSizes(msgspec.Struct, frozen=True):
    """Sizes of a step's inputs."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int
    row_tile: int = ROW_TILE
    max_padded: int = 0  # rows of the largest captured step
    num_drafts: int = 0  # per row
    pads_prompts: bool = False  # whether steps of prompts are captured
    num_tables: int = 1  # block tables of a slot
    same_inputs: tuple[tuple[int, int], ...] = ()  # tokens that are computed as another one: both

    @property
    def max_rows(self) -> int:
        return max_rows(self.max_num_tokens, self.max_num_seqs)

    @property
    def num_blocks(self) -> int:
        """Return the number of entries of a block table."""
        return -(-(-(-self.max_model_len // KEY_SPLIT) * KEY_SPLIT) // self.block_size)


class RowsOfSlots(msgspec.Struct, frozen=True):
    """Sequence i has positions [starts[i], starts[i] + counts[i]) of `slots[i]`; `kept_row_ids` are indexes of rows."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    kept_row_ids: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Return the position of each row."""
        starts, counts = self.starts, self.counts
        positions: np.ndarray = np.arange(int(counts.sum())) + (starts - np.cumsum(counts) + counts).repeat(counts)
        return positions


class RowColumns(Protocol):
    """Tensors that an extension adds to the rows of a step."""

    def add_to(self, inputs: StepInputs) -> None:
        """Add them to `inputs`, once."""

    def set(self, inputs: StepInputs, rows: RowsOfSlots) -> None:
        """Fill them for a step."""


class StepInputs(RowInputs):
    """All rows of a step, and the kept ones among them. `columns`: what extensions add to each row."""

    layers: Any = None  # memory of MTP layers on the device (`ops/layer_rows.py`)

    def __init__(self, device: Device, sizes: InputSizes, columns: Sequence[RowColumns] = ()) -> None:
        self._sizes = sizes
        self.same_inputs = sizes.same_inputs
        room = Room(sizes.max_num_seqs, sizes.max_rows, sizes.row_tile, sizes.max_padded, sizes.pads_prompts, sizes.num_tables)
        of_rows, of_kept = self._make_derived(device, room)
        super().__init__(device, room, sizes.num_drafts, of_rows)
        self.host_block_tables = np.zeros((sizes.num_tables, sizes.max_num_seqs + 1, sizes.num_blocks), np.int32)
        if not self.is_made_on_device:
            self.block_tables = tuple(map(device.tensor, self.host_block_tables))
        self.kept = KeptRows(device, room, self.block_tables, of_kept)
        self._columns = tuple(columns)
        for each in self._columns:
            each.add_to(self)

    def _make_derived(self, device: Device, room: Room) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the tensors of all rows and of the kept ones that the device computes itself."""
        return {}, {}

    def set_rows(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        kept_counts: np.ndarray,
        slot_token_ids: np.ndarray,
        prompts: BatchSlots | None = None,
        flags: np.ndarray | None = None,
    ) -> None:
        """Set rows: sequence i computes positions [starts[i], starts[i] + counts[i]) of `slots[i]` and keeps the last
        kept_counts[i]; its tokens are in `slot_token_ids` [slots, tokens]. Sequences may be without rows. `prompts`: the slots,
        if their media and masks are needed. `flags`: of rows, for devices that compute their inputs."""
        offsets = self._set_tokens(slots, starts, counts, slot_token_ids)
        row_ids = self.kept.set_last(slots, starts + counts, kept_counts, offsets[1:])
        self._set_prompts(prompts, slots, starts, counts, row_ids)

    def _set_prompts(
        self, prompts: BatchSlots | None, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, kept_row_ids: np.ndarray
    ) -> None:
        """Set what rows take from their prompts: key bounds, and the columns of extensions."""
        bounds = None
        if prompts is not None:
            bounds = key_bounds(prompts, slots, starts, counts)
            for columns in self._columns:
                columns.set(self, RowsOfSlots(slots, starts, counts, kept_row_ids))
        self._set_bounds(bounds)
        self.kept._set_bounds(None if bounds is None else (bounds[0][kept_row_ids], bounds[1][kept_row_ids]))

    def pad(self, size: int) -> None:
        super().pad(size)
        self.kept.pad(size)

    def start(self, slots: BatchSlots, slot: int) -> None:
        """Handle a new sequence in the slot."""
        self._upload_tables()

    def grow(self, tables: np.ndarray, slots: np.ndarray, indexes: np.ndarray) -> None:
        """Handle new entries in the host's block tables."""
        if len(slots):
            self._upload_tables()

    def _upload_tables(self) -> None:
        for host, tensor in zip(self.host_block_tables, self.block_tables, strict=True):
            self._device.upload(host, tensor)


def key_bounds(
    prompts: BatchSlots, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first and last key of each row of these sequences, or None if all are causal."""
    is_bounded = (prompts.bounds_ends[slots] > starts) & (counts > 0)
    if not is_bounded.any():
        return None
    offsets = np.cumsum(counts) - counts
    last = np.arange(int(counts.sum()), dtype=np.int32) + (starts - offsets).repeat(counts).astype(np.int32)
    first = np.zeros_like(last)
    for index in np.flatnonzero(is_bounded).tolist():
        end = starts[index] + counts[index]
        of_chunk = prompts.mask_bounds[slots[index]][starts[index] : end]
        assert of_chunk[:, 1].max() < end, f"a chunk ends at {end}, before the last key of tokens from {starts[index]} on"
        rows = slice(offsets[index], offsets[index] + len(of_chunk))
        first[rows], last[rows] = of_chunk.T
    return first, last
