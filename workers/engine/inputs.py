"""What one step reads on the device: metadata in tensors that are allocated once and never move.

Owned by the runner, which fills it from a Step; read by the ops (`ops.table.Inputs`). `set_rows` writes every tensor to its
full length, so that no tail of a longer earlier step is ever visible, and everything is refreshed before anything of the step
is run. `KeptRows` is the same of those rows that the last layer goes on with once its keys and values are stored.

    sequence 0, 3 rows | sequence 1, 1 row | padding to the op table's row_tile
    token_ids           5 7 9 | 4 | 0 0 ...
    positions           0 1 2 | 8 | 0 0 ...
    row_slots           2 2 2 | 6 | n n ...      n = max_num_seqs: a block table of zeros, so the dummy block
    sequence_offsets    [0, 3, 4, 4, ...]        LoD

A step that is replayed as it was captured is complete first and then padded to its size (`pad`): each further row is a sequence
of the dummy slot, and there are always as many sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from engine.checkpoint import comm_spec
from engine.checkpoint.comm_spec import max_logit_rows, max_rows
from ops.modules import Tensor
from ops.table import HAS_BOUNDS, KEY_SPLIT, NUM_LOGIT_ROWS, NUM_ROWS, NUM_SEQUENCES, NUM_TOKENS, ROW_TILE
from workers.devices.device import Device
from workers.engine.slots import Slots
from workers.extensions.media.media_rows import MediaRows

assert comm_spec.ROW_TILE == ROW_TILE, "engine/checkpoint/comm_spec.py and ops/table.py pad steps differently"


class Room(msgspec.Struct, frozen=True):
    """How much there is at most of what a step's rows have."""

    max_num_seqs: int
    max_rows: int
    row_tile: int
    max_padded: int = 0  # rows that a step is padded to by `pad`
    features: np.ndarray | None = None  # of the encoder arena
    has_adapters: bool = False
    pads_prompts: bool = False  # what is padded by `pad` are steps of prompts

    @property
    def max_tiles(self) -> int:
        return max(self.max_rows, self.max_rows // ROW_TILE + self.max_num_seqs + 1)


class AttentionMetadata:
    """Rows of some sequences, as attention reads them, and how much of the tensors they use. Attributes without `host_` are the
    device's."""

    block_tables: Tensor
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
    adapter_slots: Tensor  # of engines with adapters

    in_place: Any = None  # `ops/paddle/metadata.py`, InPlace: what `begin` makes the tensors of; None: they are there

    def __init__(self, device: Device, room: Room, derived: Mapping[str, Tensor] | None = None) -> None:
        """`derived`: those that the device makes by itself, and nobody sets."""
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
            self._add(name, num_values)
        if room.has_adapters:
            self._add("adapter_slots", max_rows)
        self.features = room.features
        self.host_counts = np.zeros(5, np.int32)
        self.num_rows = 0
        self.num_tokens = 0
        self.num_tiles = 0
        self.tile_rows = 1
        self.num_key_splits = 0

    def _add(self, name: str, *shape: int, dtype: type = np.int32) -> None:
        if name in self._derived:
            setattr(self, name, self._derived[name])
            return
        self._host[name] = np.zeros(shape, dtype)
        setattr(self, name, self._device.tensor(self._host[name]))

    def padded(self, num_rows: int) -> int:
        """`num_rows` rounded up to a multiple of the op table's row_tile. A table with padded rows is never given none: it may
        not know empty tensors."""
        return -(-max(num_rows, self._row_tile - 1) // self._row_tile) * self._row_tile

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, by name."""
        return ((name, getattr(self, name)) for name in (*self._derived, *self._host))

    def _count(self, num_tokens: int, counts: np.ndarray) -> None:
        """How many rows there are: of sequences with `counts` positions, `num_tokens` together."""
        self.num_tokens = num_tokens
        self.num_rows = self.padded(num_tokens)
        host = self.host_counts
        host[NUM_ROWS], host[NUM_SEQUENCES], host[NUM_TOKENS] = self.num_rows, len(counts), num_tokens

    def _count_tiles(self, ends: np.ndarray, counts: np.ndarray) -> None:
        """How many tiles and keys there are, of sequences with `counts` positions before `ends`."""
        self.num_key_splits = -(-int(ends.max(initial=1)) // KEY_SPLIT)
        is_single = counts.max(initial=0) <= 1
        self.tile_rows = 1 if is_single else ROW_TILE
        self.num_tiles = self.num_rows if is_single else int((-(-counts // ROW_TILE)).sum()) + 1

    def _set_sequences(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Sequence i has the positions [starts[i], starts[i] + counts[i]) of `slots[i]`, maybe none. Returns the first row of
        each, and the end of the last: [sequences + 1]."""
        offsets = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        self._count(int(offsets[-1]), counts)
        self._set("sequence_slots", slots, self._dummy_slot)
        self._set("sequence_offsets", offsets, self.num_tokens)
        self._set("sequence_starts", starts)
        if self._row_tile > 1:  # a table without padded rows reads no tiles either
            ends = starts + counts
            self._count_tiles(ends, counts)
            self._set("context_lengths", ends)
            if self.tile_rows == 1:
                self._set_single_rows(slots, starts, counts)
            else:
                self._set_tiles(slots, starts, counts, offsets)
        return offsets

    def _set_single_rows(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """One row a sequence: each row is its own tile."""
        row_ids = np.arange(self.num_rows)
        self._set("tile_slots", slots[counts > 0], self._dummy_slot)
        self._set("tile_contexts", starts[counts > 0] + 1, 1)
        self._set("tile_row_ids", row_ids)
        self._set("row_queries", row_ids)

    def _set_tiles(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> None:
        """Tiles of ROW_TILE queries of one sequence; a place without a query repeats the tile's first. The padded rows, if
        there are any, are in one more tile, of the dummy slot."""
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
        self._set("tile_slots", slots[sequences], self._dummy_slot)
        self._set("tile_contexts", contexts[sequences], 1)
        self._set("tile_row_ids", np.where(is_query, row_ids, np.minimum(first_rows, self.num_rows - 1)[:, None]).ravel())
        self._set("row_queries", row_queries)

    def padded_sequences(self, size: int) -> int:
        """Sequences of a step that is padded to `size` rows: of the batch and of the padded rows, some of them empty."""
        return self._dummy_slot + size

    def pad(self, size: int) -> None:
        """Have `size` rows: behind those that are set, others at position 0 of the dummy slot. What is read of these by row is
        there already, as padding; here they become sequences."""
        assert self._row_tile == 1, "a table with tiles has padded rows of its own"
        assert self.num_tokens <= size <= self.max_rows, f"{self.num_tokens} rows to be padded to {size}"
        first = int(self.host_counts[NUM_SEQUENCES])
        ends = self._host["sequence_offsets"][first:]
        ends[:] = np.minimum(np.arange(self.num_tokens, self.num_tokens + len(ends)), size)
        self._upload("sequence_offsets")
        self.num_rows = size
        self.host_counts[[NUM_ROWS, NUM_SEQUENCES]] = size, self.padded_sequences(size)

    def _set_bounds(self, bounds: tuple[np.ndarray, np.ndarray] | None) -> None:
        """The first and the last key of each row; None: each sees all up to itself."""
        self.host_counts[HAS_BOUNDS] = bounds is not None
        if bounds is not None:
            self._set("first_keys", bounds[0])
            self._set("last_keys", bounds[1])

    def _set(self, name: str, values: np.ndarray, filler: int = 0) -> None:
        host = self._host[name]
        assert len(values) <= len(host), f"{name}: {len(values)} values, room for {len(host)}"
        host[: len(values)] = values
        host[len(values) :] = filler
        self._upload(name)

    def _upload(self, name: str) -> None:
        self._device.upload(self._host[name], getattr(self, name))


class KeptRows(AttentionMetadata):
    """The last rows of each sequence of a step, as many as are wanted of it: `row_ids` tells where they are among all."""

    row_ids: Tensor

    def __init__(self, device: Device, room: Room, block_tables: Tensor, derived: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(device, room, derived)
        self.block_tables = block_tables
        self._add("row_ids", room.max_rows)

    def set_last(self, slots: np.ndarray, ends: np.ndarray, counts: np.ndarray, end_rows: np.ndarray) -> np.ndarray:
        """Keep the last counts[i] positions of sequence i, which ends before ends[i], in the step before row end_rows[i]. Which
        of the step's rows these are."""
        starts = ends - counts
        offsets = self._set_sequences(slots, starts, counts)
        distances = np.arange(self.num_tokens) - offsets[1:].repeat(counts)
        row_ids: np.ndarray = distances + end_rows.repeat(counts)
        self._set("row_ids", row_ids)
        if self._row_tile > 1:
            self._set("positions", distances + ends.repeat(counts))
        return row_ids

    def set_of_all(
        self,
        row_ids: np.ndarray,
        bounds: tuple[np.ndarray, np.ndarray] | None,
        media: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """What the kept ones, `row_ids`, have of what all rows have: key bounds; feature rows and sets of experts."""
        self._set_bounds(None if bounds is None else (bounds[0][row_ids], bounds[1][row_ids]))
        if media is not None:
            self._set("feature_rows", media[0][row_ids], -1)
            self._set("expert_sets", media[1][row_ids])


class RowInputs(AttentionMetadata):
    """Rows with their tokens, and which of them have logits that are wanted."""

    token_ids: Tensor
    row_slots: Tensor
    slot_mapping: Tensor
    logit_row_ids: Tensor
    position_rows: Tensor  # of models that look positions up
    row_numbers: Tensor  # this and the next two: of steps of models whose positions are three numbers
    row_cosines: Tensor
    row_sines: Tensor

    has_first_logit_rows = False  # those that are wanted are known to be the first ones that are kept

    def __init__(self, device: Device, room: Room, num_drafts: int = 0, derived: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(device, room, derived)
        self.max_logit_rows = max_logit_rows(room.max_rows, room.max_num_seqs, num_drafts)
        self._add("token_ids", room.max_rows)
        self._add("row_slots", room.max_rows)
        self._add("slot_mapping", room.max_rows)  # the device's alone
        self._add("logit_row_ids", self.max_logit_rows)
        self.num_logit_rows = 0

    def _set_tokens(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slot_token_ids: np.ndarray) -> np.ndarray:
        """As `_set_sequences`, with the tokens there are at these positions in `slot_token_ids` [slots, tokens]."""
        offsets = self._set_sequences(slots, starts, counts)
        row_slots = slots.repeat(counts)
        positions = np.arange(self.num_tokens) + (starts - offsets[:-1]).repeat(counts)
        self._set("row_slots", row_slots, self._dummy_slot)
        self._set("positions", positions)
        self._set("token_ids", slot_token_ids[row_slots, positions])
        return offsets

    def set_logit_rows(self, row_ids: np.ndarray) -> None:
        """The kept rows whose logits are wanted, in this order; `max_logit_rows` at most."""
        self.num_logit_rows = len(row_ids)
        self.host_counts[NUM_LOGIT_ROWS] = self.num_logit_rows
        self._set("logit_row_ids", row_ids)


class StepInputs(RowInputs):
    """All rows, and of them those that are kept."""

    layers: Any = None  # that draft on the device: their memory (`ops/paddle/layer_rows.py`)

    def __init__(
        self,
        device: Device,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        row_tile: int = ROW_TILE,
        media: MediaRows | None = None,
        max_padded: int = 0,
        num_drafts: int = 0,
        num_looked_up: int = 0,
        has_adapters: bool = False,
        pads_prompts: bool = False,
    ) -> None:
        """`num_looked_up`: of models that look positions up, so many are there of each type of text."""
        features = None if media is None else media.features
        num_rows = max_rows(max_num_tokens, max_num_seqs)
        room = Room(max_num_seqs, num_rows, row_tile, max_padded, features, has_adapters, pads_prompts)
        num_blocks = -(-(-(-max_model_len // KEY_SPLIT) * KEY_SPLIT) // block_size)
        of_rows, of_kept = self._make_derived(device, room, max_model_len, num_blocks, num_drafts)
        super().__init__(device, room, num_drafts, of_rows)
        self._media = media
        self._has_adapters = has_adapters
        self.host_block_tables = np.zeros((max_num_seqs + 1, num_blocks), np.int32)
        if "block_tables" not in of_rows:
            self.block_tables = device.tensor(self.host_block_tables)
        if media is not None and media.has_axes:
            self._add("row_numbers", room.max_rows)
            self._set("row_numbers", np.arange(room.max_rows))
            self._add("row_cosines", room.max_rows, media.head_dim, dtype=np.float32)
            self._add("row_sines", room.max_rows, media.head_dim, dtype=np.float32)
        self._num_looked_up = num_looked_up
        if num_looked_up:
            self._add("position_rows", room.max_rows)
        self.kept = KeptRows(device, room, self.block_tables, of_kept)

    def _make_derived(
        self, device: Device, room: Room, max_model_len: int, num_blocks: int, num_drafts: int
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Tensors of all rows and of the kept ones that the device makes by itself."""
        return {}, {}

    def set_rows(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        kept_counts: np.ndarray,
        slot_token_ids: np.ndarray,
        prompts: Slots | None = None,
        flags: np.ndarray | None = None,
    ) -> None:
        """Sequence i computes positions [starts[i], starts[i] + counts[i]) of `slots[i]`, of which the last kept_counts[i] are
        kept; its tokens are in `slot_token_ids` [slots, tokens]. Sequences without rows may be among them. `prompts`: the slots
        themselves, where their media and masks count. `flags`: of rows, for devices that make their inputs themselves."""
        offsets = self._set_tokens(slots, starts, counts, slot_token_ids)
        row_ids = self.kept.set_last(slots, starts + counts, kept_counts, offsets[1:])
        if prompts is not None:
            self._set_prompts(prompts, slots, starts, counts, row_ids)
        else:
            self._set_bounds(None)
            self.kept.set_of_all(row_ids, None, None)
            self._set_adapters(np.full(self.num_tokens, -1), row_ids)

    def _set_prompts(
        self, prompts: Slots, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, kept_row_ids: np.ndarray
    ) -> None:
        """What rows have of their prompts' masks and media."""
        bounds, media = key_bounds(prompts, slots, starts, counts), None
        if self._media is not None:
            row_slots = slots.repeat(counts)
            positions = np.arange(self.num_tokens) + (starts - np.cumsum(counts) + counts).repeat(counts)
            rows = self._media.of(prompts, slots, starts, counts, prompts.token_ids[row_slots, positions])
            media = rows.feature_rows, rows.expert_sets
            self._set("feature_rows", rows.feature_rows, -1)
            self._set("expert_sets", rows.expert_sets)
            if self._media.has_axes:
                self._set("row_cosines", rows.cosines)
                self._set("row_sines", rows.sines)
        if self._num_looked_up:
            self._set("position_rows", looked_up_rows(prompts, slots, starts, counts, self._num_looked_up))
        self._set_bounds(bounds)
        self.kept.set_of_all(kept_row_ids, bounds, media)
        self._set_adapters(prompts.adapter_slots[slots].repeat(counts), kept_row_ids)

    def _set_adapters(self, row_slots: np.ndarray, kept_row_ids: np.ndarray) -> None:
        """Which adapter each row has."""
        if self._has_adapters:
            self._set("adapter_slots", row_slots, -1)
            self.kept._set("adapter_slots", row_slots[kept_row_ids], -1)

    def pad(self, size: int) -> None:
        super().pad(size)
        self.kept.pad(size)

    def start(self, slots: Slots, slot: int) -> None:
        """Another sequence took the slot."""
        self._device.upload(self.host_block_tables, self.block_tables)

    def grow(self, slots: np.ndarray, indexes: np.ndarray) -> None:
        """These entries of the host's block tables were written."""
        if len(slots):
            self._device.upload(self.host_block_tables, self.block_tables)


def key_bounds(
    prompts: Slots, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """The first and the last key that each row of these sequences sees; None: all see those up to themselves."""
    is_bounded = (prompts.bounds_ends[slots] > starts) & (counts > 0)
    if not is_bounded.any():
        return None
    offsets = np.cumsum(counts) - counts
    last = np.arange(int(counts.sum()), dtype=np.int32) + (starts - offsets).repeat(counts).astype(np.int32)
    first = np.zeros_like(last)
    for index in np.flatnonzero(is_bounded).tolist():
        end = starts[index] + counts[index]
        of_chunk = prompts.mask_bounds[slots[index]][starts[index] : end]
        assert of_chunk[:, 1].max() < end, f"a chunk ends at {end}, within what its token {starts[index]} and others see"
        rows = slice(offsets[index], offsets[index] + len(of_chunk))
        first[rows], last[rows] = of_chunk.T
    return first, last


def looked_up_rows(prompts: Slots, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, num_positions: int) -> np.ndarray:
    """Of each row of these sequences the row of `TypedPositions`: its position, behind those of the first text where it is of
    the second."""
    positions = np.arange(int(counts.sum())) + (starts - np.cumsum(counts) + counts).repeat(counts)
    rows: np.ndarray = positions + num_positions * (positions >= prompts.second_starts[slots].repeat(counts))
    return rows
