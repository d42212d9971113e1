"""Rows of draft layers, computed on the device from a step's buffer: draft tokens and hidden states never pass through the
host.

Used by `workers/extensions/drafts/device_draft_plan.py`. The data of `workers/engine/device_inputs.py` is preceded by int32:

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
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import paddle

from ops.modules import Tensor
from ops.paddle.metadata import num_up_to, write, write_sent
from ops.step_layout import InPlace
from ops.table import HAS_BOUNDS, NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS, Inputs, KeptRows

OF_DRAFTS, OF_ENTRIES = 5, 2  # columns
NO_ENTRIES = (1 << 31) - 1  # first position of a row without entries


class _Step(InPlace, Protocol):
    """Inputs computed on the device."""

    block_tables: Sequence[Tensor]
    token_ids: Tensor
    positions: Tensor
    row_slots: Tensor
    logit_row_ids: Tensor
    kept: KeptRows


class LayerMemory(msgspec.Struct, frozen=True):
    """State between steps, at fixed addresses."""

    step: Any  # as _Step
    columns: Tensor  # int32 [OF_DRAFTS * max_drafted + OF_ENTRIES * num_slots]
    states: Tensor  # float32 [(num_slots + 1) * group, hidden]; the first row of the last group stays 0
    fed: Tensor  # float32 [max_drafted, hidden]: left by the last draft
    kept: Tensor  # float32 [maximum captured rows, hidden]: from the last replayed graph of the trunk
    max_drafted: int
    group: int  # states of a sequence

    def keep_hidden(self, hidden: Tensor) -> None:
        """Keep the hidden states of the kept rows. Part of the trunk's graphs."""
        paddle.assign(hidden, output=self.kept[: hidden.shape[0]])

    def with_read_tokens(self, drawn: Tensor | None, row_ids: Tensor) -> Tensor:
        """Return the `drawn` tokens (int32 [n, m]), if any, of the kept rows `row_ids` (int32 [m]), followed by the token that
        each row read, which may be a draft token that the host does not know yet."""
        step: _Step = self.step
        row_ids = paddle.gather(step.kept.row_ids, row_ids)
        token_ids = paddle.gather(step.token_ids, row_ids).reshape([1, -1])
        return token_ids if drawn is None else paddle.concat([drawn, token_ids])


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


def _rows(step: _Step, slots: Tensor, positions: Tensor, token_ids: Tensor, first_keys: Tensor, num_key_splits: int) -> Inputs:
    num_rows = positions.shape[0]
    counts = np.zeros(5, np.int32)
    counts[[NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS]], counts[HAS_BOUNDS] = num_rows, 1
    mappings, numbers = [paddle.zeros_like(positions) for _ in step.block_tables], step.numbers[:num_rows]
    arrays = token_ids, positions, slots, mappings, first_keys, positions + 1, numbers
    return cast(Inputs, LayerRows(num_rows, num_key_splits, step.block_tables, *arrays, counts))


def rows_of_draft(memory: LayerMemory, number: int, num_rows: int, num_key_splits: int) -> tuple[Inputs, Tensor]:
    """Return the inputs of draft `number` and the hidden state before each row; rows without that many drafts use the dummy
    slot."""
    step: _Step = memory.step
    sizes = step.sizes
    if number == 0:
        write_sent(step)
    slots, starts, counts, first_keys, states = _of_draft_tokens(memory, num_rows)
    is_drafted = (counts > number).astype("int32")
    slots = (slots - sizes.num_slots) * is_drafted + sizes.num_slots
    positions = (starts + number) * is_drafted
    token_ids = paddle.gather(step.slots, slots * sizes.num_positions + positions)
    hidden = memory.fed[:num_rows] if number else paddle.gather(memory.states, states)
    return _rows(step, slots, positions, token_ids, first_keys * is_drafted, num_key_splits), hidden


def put_draft(memory: LayerMemory, number: int, part: slice, tokens: Tensor) -> None:
    """Store the `tokens` (int32 [m]) drafted for a part of the rows as the next ones of their slots."""
    step: _Step = memory.step
    slots, starts, counts, _, _ = (column[part] for column in _of_draft_tokens(memory, part.stop))
    places = slots * step.sizes.num_positions + starts + (number + 1)
    write(step, places, tokens, (counts > number).astype("int32"))


def put_fed(memory: LayerMemory, fed: Tensor) -> None:
    """Store the hidden states of the next draft token, [rows, hidden]."""
    paddle.assign(fed, output=memory.fed[: fed.shape[0]])


def _of_draft_tokens(memory: LayerMemory, num_rows: int) -> list[Tensor]:
    columns = memory.columns[: OF_DRAFTS * memory.max_drafted].reshape([OF_DRAFTS, memory.max_drafted])
    return [columns[number][:num_rows] for number in range(OF_DRAFTS)]


def rows_of_entries(memory: LayerMemory, kept_hidden: Tensor) -> tuple[Inputs, Tensor]:
    """Return the step's kept rows with their hidden states [m, hidden]; rows without an entry go to the dummy slot. Remembers
    the last states of each sequence."""
    step: _Step = memory.step
    sizes, kept, num_rows = step.sizes, step.kept, kept_hidden.shape[0]
    count = sizes.num_slots
    numbers, offsets = step.numbers[:num_rows], kept.sequence_offsets
    sequences = num_up_to(offsets[1 : 1 + count], numbers)
    is_row = (sequences < count).astype("int32")
    sequences = paddle.clip(sequences, max=count - 1)
    begin = OF_DRAFTS * memory.max_drafted
    first_entries = paddle.gather(memory.columns[begin : begin + count], sequences)
    states = paddle.gather(memory.columns[begin + count :], sequences)

    row_ids = kept.row_ids[:num_rows]
    token_ids, positions = paddle.gather(step.token_ids, row_ids), paddle.gather(step.positions, row_ids)
    is_entry = (first_entries <= positions).astype("int32") * is_row
    slots = (paddle.gather(step.row_slots, row_ids) - count) * is_entry + count
    is_first = (numbers == paddle.gather(offsets[:count], sequences)).unsqueeze(1).expand(kept_hidden.shape)
    before = paddle.where(is_first, paddle.gather(memory.states, states), _one_later(kept_hidden))

    # the last row of a sequence has the last place in its group
    places = numbers - paddle.gather(offsets[1 : 1 + count], sequences) + memory.group
    is_last = paddle.clip(places + 1, min=0, max=1) * is_row
    nowhere = memory.states.shape[0] - 1
    groups = states - states % memory.group
    paddle.scatter_(memory.states, (groups + places - nowhere) * is_last + nowhere, kept_hidden)
    return _rows(step, slots, positions, token_ids, positions, 1), before


def _one_later(rows: Tensor) -> Tensor:
    return paddle.concat([rows[:1], rows[:-1]])


def draft_tokens(memory: LayerMemory, num_rows: int, count: int) -> Tensor:
    """Return the first `count` tokens after the last one of each drafted row, int32 [rows, count]."""
    step: _Step = memory.step
    slots, starts, _, _, _ = _of_draft_tokens(memory, num_rows)
    firsts = (slots * step.sizes.num_positions + starts + 1).unsqueeze(1).expand([num_rows, count])
    places = firsts + step.numbers[:count].unsqueeze(0).expand([num_rows, count])
    return paddle.gather(step.slots, places.flatten()).reshape([num_rows, count])
