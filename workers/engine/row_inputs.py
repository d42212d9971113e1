"""Rows of sequences as attention reads them, in tensors that are allocated once and never move.

Base of the inputs of a step (`inputs.py`), of MTP layers, and of the encoder's segments. `KeptRows` has the same for the rows
that the last layer computes after storing its keys and values.

    sequence 0, 3 rows | sequence 1, 1 row | padding to the op table's row_tile
    token_ids           5 7 9 | 4 | 0 0 ...
    positions           0 1 2 | 8 | 0 0 ...
    row_slots           2 2 2 | 6 | n n ...      n = max_num_seqs: a block table of zeros, so the dummy block
    sequence_offsets    [0, 3, 4, 4, ...]        LoD

A step that replays a capture is completed first and then padded to its size (`pad`): each padded row is a sequence of the dummy
slot, so the number of sequences is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from engine.checkpoint import comm_spec
from engine.checkpoint.comm_spec import max_logit_rows
from ops.modules import Tensor
from ops.table import HAS_BOUNDS, KEY_SPLIT, NUM_LOGIT_ROWS, NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS, ROW_TILE
from workers.devices.device import Device

assert comm_spec.ROW_TILE == ROW_TILE, "engine/checkpoint/comm_spec.py and ops/table.py pad steps differently"


class Room(msgspec.Struct, frozen=True):
    """Maximum sizes of a step's rows."""

    max_num_seqs: int
    max_rows: int
    row_tile: int
    max_padded: int = 0  # rows to which `pad` extends a step
    pads_prompts: bool = False  # whether `pad` extends steps of prompts
    num_tables: int = 1  # block tables of a slot

    @property
    def max_tiles(self) -> int:
        return max(self.max_rows, self.max_rows // ROW_TILE + self.max_num_seqs + 1)


class AttentionMetadata:
    """Rows of some sequences as attention reads them, and the used length of the tensors. Attributes without `host_` are on the
    device."""

    block_tables: Sequence[Tensor]
    positions: Tensor
    sequence_slots: Tensor
    sequence_offsets: Tensor
    sequence_starts: Tensor
    context_lengths: Tensor
    tile_slots: Tensor
    tile_contexts: Tensor
    tile_row_ids: Tensor
    row_queries: Tensor
    first_keys: Tensor
    last_keys: Tensor
    feature_rows: Tensor
    expert_sets: Tensor
    adapter_slots: Tensor  # only in engines with adapters

    features: np.ndarray | None = None  # rows of the encoder arena, indexed by `feature_rows`

    is_made_on_device = False  # `begin` of the ops computes the tensors from the copy (`device_inputs.py`)

    def __init__(self, device: Device, room: Room, derived: Mapping[str, Tensor] | None = None) -> None:
        """`derived`: tensors that the device computes itself; they are never set."""
        self._device = device
        self._derived = derived or {}
        self._dummy_slot = max_num_seqs = room.max_num_seqs
        self._row_tile = room.row_tile
        self._host: dict[str, np.ndarray] = {}
        self.max_rows = max_rows = room.max_rows
        max_padded, max_tiles = room.max_padded, room.max_tiles
        for name, num_values in (
            ("positions", max_rows),
            ("sequence_slots", max_num_seqs + max_padded),
            ("sequence_offsets", max_num_seqs + max_padded + 1),
            ("sequence_starts", max_num_seqs + max_padded),
            ("context_lengths", max_num_seqs),
            ("tile_slots", max_tiles),
            ("tile_contexts", max_tiles),
            ("tile_row_ids", max_tiles * ROW_TILE),
            ("row_queries", max_rows),
            ("first_keys", max_rows),
            ("last_keys", max_rows),
            ("feature_rows", max_rows),
            ("expert_sets", max_rows),
        ):
            self.add(name, num_values)
        self.host_counts = np.zeros(5, np.int32)
        self.num_rows = 0
        self.num_tokens = 0
        self.num_tiles = 0
        self.tile_rows = 1
        self.num_key_splits = 0

    def add(self, name: str, *shape: int, dtype: type = np.int32) -> None:
        """Add the tensor `name`, zeros, unless the device computes it itself."""
        if name in self._derived:
            setattr(self, name, self._derived[name])
            return
        self._host[name] = np.zeros(shape, dtype)
        setattr(self, name, self._device.tensor(self._host[name]))

    def padded(self, num_rows: int) -> int:
        """Return `num_rows` rounded up to a multiple of the op table's row_tile. A table with padded rows gets at least one
        tile, because it may not support empty tensors."""
        return -(-max(num_rows, self._row_tile - 1) // self._row_tile) * self._row_tile

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, by name."""
        return ((name, getattr(self, name)) for name in (*self._derived, *self._host))

    def _count(self, num_tokens: int, counts: np.ndarray) -> None:
        """Set the numbers of rows: of sequences with `counts` positions, `num_tokens` in all."""
        self.num_tokens = num_tokens
        self.num_rows = self.padded(num_tokens)
        host = self.host_counts
        host[NUM_ROWS], host[NUM_SEQUENCES], host[NUM_TOKENS] = self.num_rows, len(counts), num_tokens

    def _count_tiles(self, ends: np.ndarray, counts: np.ndarray) -> None:
        """Set the numbers of tiles and keys, of sequences with `counts` positions before `ends`."""
        self.num_key_splits = -(-int(ends.max(initial=1)) // KEY_SPLIT)
        is_single = counts.max(initial=0) <= 1
        self.tile_rows = 1 if is_single else ROW_TILE
        self.num_tiles = self.num_rows if is_single else int((-(-counts // ROW_TILE)).sum()) + 1

    def _set_sequences(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Set sequences: i has positions [starts[i], starts[i] + counts[i]) of `slots[i]`, possibly none. Return the first row
        of each, and the end of the last: [sequences + 1]."""
        offsets = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        self._count(int(offsets[-1]), counts)
        self.set("sequence_slots", slots, self._dummy_slot)
        self.set("sequence_offsets", offsets, self.num_tokens)
        self.set("sequence_starts", starts)
        if self._row_tile > 1:  # a table without padded rows reads no tiles either
            ends = starts + counts
            self._count_tiles(ends, counts)
            self.set("context_lengths", ends)
            if self.tile_rows == 1:
                self._set_single_rows(slots, starts, counts)
            else:
                self._set_tiles(slots, starts, counts, offsets)
        return offsets

    def _set_single_rows(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Set one row per sequence: each row is a tile."""
        row_ids = np.arange(self.num_rows)
        self.set("tile_slots", slots[counts > 0], self._dummy_slot)
        self.set("tile_contexts", starts[counts > 0] + 1, 1)
        self.set("tile_row_ids", row_ids)
        self.set("row_queries", row_ids)

    def _set_tiles(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> None:
        """Set tiles of ROW_TILE queries of one sequence; unused places repeat the tile's first query. Padded rows are in one
        more tile, of the dummy slot."""
        slots = np.append(slots, self._dummy_slot)
        contexts = np.append(starts + counts, 1)
        counts = np.append(counts, self.num_rows - self.num_tokens)
        num_tiles = -(-counts // ROW_TILE)
        num_tiles[-1] = 1
        sequences = np.repeat(np.arange(len(counts)), num_tiles)
        tile_index = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        first_rows = offsets[sequences] + tile_index * ROW_TILE
        end_rows = offsets + counts
        row_ids = first_rows[:, None] + np.arange(ROW_TILE)
        is_query = row_ids < end_rows[sequences, None]
        row_queries = np.empty(self.num_rows, np.int32)
        row_queries[row_ids[is_query]] = np.flatnonzero(is_query)
        self.set("tile_slots", slots[sequences], self._dummy_slot)
        self.set("tile_contexts", contexts[sequences], 1)
        self.set("tile_row_ids", np.where(is_query, row_ids, np.minimum(first_rows, self.num_rows - 1)[:, None]).ravel())
        self.set("row_queries", row_queries)

    def padded_sequences(self, size: int) -> int:
        """Return the sequences of a step padded to `size` rows: those of the batch and of the padded rows, some of them
        empty."""
        return self._dummy_slot + size

    def pad(self, size: int) -> None:
        """Extend the rows to `size`, with rows at position 0 of the dummy slot. Their values per row are there already, as
        padding; here they become sequences."""
        assert self._row_tile == 1, "a table with tiles has padded rows of its own"
        assert self.num_tokens <= size <= self.max_rows, f"{self.num_tokens} rows to be padded to {size}"
        first = int(self.host_counts[NUM_SEQUENCES])
        ends = self._host["sequence_offsets"][first:]
        ends[:] = np.minimum(np.arange(self.num_tokens, self.num_tokens + len(ends)), size)
        self._upload("sequence_offsets")
        self.num_rows = size
        self.host_counts[[NUM_ROWS, NUM_SEQUENCES]] = size, self.padded_sequences(size)

    def _set_bounds(self, bounds: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Set the first and last key of each row; None: causal."""
        self.host_counts[HAS_BOUNDS] = bounds is not None
        if bounds is not None:
            self.set("first_keys", bounds[0])
            self.set("last_keys", bounds[1])

    def set(self, name: str, values: np.ndarray, filler: int = 0) -> None:
        """Write the tensor `name`: `values`, then `filler`."""
        host = self._host[name]
        assert len(values) <= len(host), f"{name}: {len(values)} values, room for {len(host)}"
        host[: len(values)] = values
        host[len(values) :] = filler
        self._upload(name)

    def _upload(self, name: str) -> None:
        self._device.upload(self._host[name], getattr(self, name))


class KeptRows(AttentionMetadata):
    """The kept rows at the end of each sequence of a step; `row_ids` are their indexes among all rows."""

    row_ids: Tensor

    def __init__(
        self, device: Device, room: Room, block_tables: Sequence[Tensor], derived: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(device, room, derived)
        self.block_tables = block_tables
        self.add("row_ids", room.max_rows)

    def set_last(self, slots: np.ndarray, ends: np.ndarray, counts: np.ndarray, end_rows: np.ndarray) -> np.ndarray:
        """Keep the last counts[i] positions of sequence i, which ends before position ends[i] and before row end_rows[i] of the
        step. Return the indexes of these rows."""
        starts = ends - counts
        offsets = self._set_sequences(slots, starts, counts)
        distances = np.arange(self.num_tokens) - offsets[1:].repeat(counts)
        row_ids: np.ndarray = distances + end_rows.repeat(counts)
        self.set("row_ids", row_ids)
        if self._row_tile > 1:
            self.set("positions", distances + ends.repeat(counts))
        return row_ids


class RowInputs(AttentionMetadata):
    """Rows with their tokens, and a selection of rows with logits."""

    token_ids: Tensor
    row_slots: Tensor
    slot_mapping: Tensor  # of the first block table
    slot_mappings: Sequence[Tensor]
    logit_row_ids: Tensor
    position_rows: Tensor  # of models with learned positions
    row_numbers: Tensor  # this and the next two: of models with three position numbers
    row_cosines: Tensor
    row_sines: Tensor
    states: Tensor  # of models with recurrent layers

    same_inputs: Sequence[tuple[int, int]] = ()  # tokens that are computed as another one: both
    has_first_logit_rows = False  # whether the selected rows are the first of the kept ones

    def __init__(self, device: Device, room: Room, num_drafts: int = 0, derived: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(device, room, derived)
        self.max_logit_rows = max_logit_rows(room.max_rows, room.max_num_seqs, num_drafts)
        self.add("token_ids", room.max_rows)
        self.add("row_slots", room.max_rows)
        names = ["slot_mapping", *(f"slot_mapping_{number}" for number in range(1, room.num_tables))]
        for name in names:
            self.add(name, room.max_rows)  # only on the device
        self.slot_mappings = tuple(getattr(self, name) for name in names)
        self.add("logit_row_ids", self.max_logit_rows)
        self.num_logit_rows = 0

    def _set_tokens(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slot_token_ids: np.ndarray) -> np.ndarray:
        """Set sequences (`_set_sequences`) with the tokens at their positions in `slot_token_ids` [slots, tokens]."""
        offsets = self._set_sequences(slots, starts, counts)
        row_slots = slots.repeat(counts)
        positions = np.arange(self.num_tokens) + (starts - offsets[:-1]).repeat(counts)
        self.set("row_slots", row_slots, self._dummy_slot)
        self.set("positions", positions)
        token_ids = slot_token_ids[row_slots, positions]
        for token_id, other in self.same_inputs:
            token_ids[token_ids == token_id] = other
        self.set("token_ids", token_ids)
        return offsets

    def set_logit_rows(self, row_ids: np.ndarray) -> None:
        """Select the kept rows that need logits, in this order; at most `max_logit_rows`."""
        self.num_logit_rows = len(row_ids)
        self.host_counts[NUM_LOGIT_ROWS] = self.num_logit_rows
        self.set("logit_row_ids", row_ids)
