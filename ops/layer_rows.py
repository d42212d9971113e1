"""Rows of draft layers, computed on the device from a step's buffer: draft tokens and hidden states never pass through the
host.

Used by `workers/extensions/drafts/device_draft_plan.py`; implemented by `ops/paddle/reference/layer_rows.py` and
`ops/cuda/layer_rows.py`. The data of `workers/engine/device_inputs.py` is preceded by int32:

    drafts   slot, position of its last token, draft tokens, first key, state    a column of max_drafted each, most drafts first
    entries  first position that gets an entry, state                            a column of num_slots each, as the step's rows

A `state` is a row of `LayerMemory.states`: the trunk's hidden state before the first token of a row. A step stores the states
of the last 1 + k positions of each sequence as a group; the host later names the last accepted one.

    draft n of a row that begins at p    token p + n, written by draft n - 1, and the state, or the one that draft n - 1 left
    entry of position j                  token j, and the state of the row before: of this step, or, for the first, as sent

Entries of rejected draft tokens are written too; the next row overwrites them, and entries after a row are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from ops.modules import Tensor
from ops.step_layout import InPlace
from ops.table import HAS_BOUNDS, NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS, Inputs, KeptRows

OF_DRAFTS, OF_ENTRIES = 5, 2  # columns
NO_ENTRIES = (1 << 31) - 1  # first position of a row without entries


class DeviceStep(InPlace, Protocol):
    """Inputs of a step that the device computes."""

    block_tables: Sequence[Tensor]
    token_ids: Tensor
    positions: Tensor
    row_slots: Tensor
    logit_row_ids: Tensor

    @property
    def kept(self) -> KeptRows: ...


class LayerSizes(msgspec.Struct, frozen=True):
    """Sizes of `LayerMemory`."""

    max_drafted: int  # rows with draft tokens
    group: int  # states of a sequence
    max_kept: int  # rows of the largest captured step
    hidden_size: int


class LayerMemory(Protocol):
    """State between steps, at fixed addresses, and the work on it."""

    sizes: LayerSizes
    columns: Tensor  # int32 [OF_DRAFTS * max_drafted + OF_ENTRIES * num_slots]
    states: Tensor  # [(num_slots + 1) * group, hidden]; the first row of the last group stays 0
    fed: Tensor  # [max_drafted, hidden]: left by the last draft
    kept: Tensor  # [max_kept, hidden]: from the last replayed graph of the trunk

    def keep_hidden(self, hidden: Tensor) -> None:
        """Keep the hidden states of the kept rows. Part of the trunk's graphs."""

    def with_read_tokens(self, drawn: Tensor | None, row_ids: Tensor) -> Tensor:
        """Return the `drawn` tokens (int32 [n, m]), if any, of the kept rows `row_ids` (int32 [m]), followed by the token that
        each row read, which may be a draft token that the host does not know yet."""

    def rows_of_draft(self, number: int, num_rows: int, num_key_splits: int) -> tuple[Inputs, Tensor]:
        """Return the inputs of draft `number` and the hidden state before each row; rows without that many drafts use the dummy
        slot."""

    def put_draft(self, number: int, part: slice, logits: Tensor) -> None:
        """Store the likeliest tokens of `logits` (float32 [m, vocab]) of a part of the rows as the next ones of their slots."""

    def put_fed(self, fed: Tensor) -> None:
        """Store the hidden states of the next draft token, [rows, hidden]."""

    def rows_of_entries(self, kept_hidden: Tensor) -> tuple[Inputs, Tensor]:
        """Return the step's kept rows, and the hidden state before each, from theirs [m, hidden]; rows without an entry go to
        the dummy slot. Remembers the last states of each sequence."""

    def draft_tokens(self, num_rows: int, count: int) -> Tensor:
        """Return the first `count` tokens after the last one of each drafted row, int32 [rows, count]."""


class LayerRows(msgspec.Struct):
    """Fields of `ops.table.Inputs` that these layers read: each row is a sequence of its own."""

    num_rows: int
    num_key_splits: int
    block_tables: Sequence[Tensor]
    token_ids: Tensor
    positions: Tensor
    row_slots: Tensor
    slot_mappings: Sequence[Tensor]
    first_keys: Tensor
    tile_contexts: Tensor
    tile_row_ids: Tensor
    host_counts: np.ndarray
    is_made_on_device: bool = False
    sequence_offsets: Tensor | None = None  # all rows are tokens
    same_inputs: Sequence[tuple[int, int]] = ()  # no family with MTP layers has any
    features: np.ndarray | None = None
    tile_rows: int = 1

    @property
    def max_rows(self) -> int:
        return self.num_rows

    num_tokens = num_tiles = max_rows

    @property
    def tile_slots(self) -> Tensor:
        return self.row_slots

    sequence_slots = tile_slots

    @property
    def last_keys(self) -> Tensor:
        return self.positions

    sequence_starts = last_keys

    @property
    def row_queries(self) -> Tensor:
        return self.tile_row_ids

    @property
    def context_lengths(self) -> Tensor:
        return self.tile_contexts


def counts_of(num_rows: int) -> np.ndarray:
    """Return `Inputs.host_counts` of so many rows of these layers."""
    counts = np.zeros(5, np.int32)
    counts[[NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS]], counts[HAS_BOUNDS] = num_rows, 1
    return counts
