"""Inputs of an encoder call: the patches of its units, one unit after another, in tensors that never move.

Owned by a plan of `encoder.py`. A **segment** is a set of patches that attend to each other: a frame, or a window of one. For
attention, segments are sequences with rows that attend to every key. Their keys and values are in a small paged memory that
each layer overwrites, with separate blocks per segment. Rows are computed one **slice** at a time, which may begin and end
within a segment: the memory has room for two layers, because while one slice attends, others still need its keys.

    unit 0, 24 patches                          | unit 1, 16 patches   | padding to whole tiles (reference table)
    pictures    segment 0                       | segment 1            | one more, of block 0
    windows     segment 0 | 1 | 2 | 3           | segment 4            | likewise
    slices      slice 0             | slice 1           | slice 2
    merged      rows / merge^2 tokens
    paired      ERNIE: tokens of two frames side by side, of a picture the same twice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from engine.checkpoint.vision_config import VisionConfig
from ops.cpu.array import Array, Rows
from ops.modules import KvCache, LayerCache, Rotary, Tensor
from ops.table import KEY_SPLIT, NUM_ROWS, ROW_TILE, OpTable
from workers.devices.device import Device
from workers.engine.row_inputs import AttentionMetadata, Room
from workers.extensions.media.geometry import Angles, Patches, partners_of, patches_of

_BLOCK_SIZE = 32  # slots; each segment begins at a block
_MAX_PLACES = 1 << 13  # rows or columns of patches, more than any accepted picture has


class UnitPatches(msgspec.Struct, frozen=True):
    """A unit as computed: `frames` grids of the same patches, one after another."""

    frames: int
    height: int
    width: int
    patches: Patches

    @property
    def num_rows(self) -> int:
        return self.frames * self.height * self.width


def pieces(units: Sequence[UnitPatches], begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the pieces of rows [begin, end): the unit, its grid of patches, and the patches of that grid."""
    first = 0
    for index, unit in enumerate(units):
        area = unit.height * unit.width
        for grid in range(unit.frames):
            found = slice(max(begin - first, 0), min(end - first, area))
            if found.start < found.stop:
                yield index, grid, found
            first += area


class Tables:
    """The segments of one kind and their blocks."""

    def __init__(self, device: Device, max_segments: int, max_rows: int) -> None:
        self._device = device
        self._host = np.zeros((max_segments + 1, -(-max_rows // _BLOCK_SIZE) + 2), np.int32)
        self.tensor: Tensor = device.tensor(self._host)
        self.dummy_slot = max_segments
        self.lengths = self.ends = np.zeros(0, np.int64)  # rows of each segment, and its end

    def set_lengths(self, lengths: np.ndarray) -> None:
        self.lengths, self.ends = lengths, np.cumsum(lengths)
        blocks = -(-lengths // _BLOCK_SIZE)
        firsts = 1 + np.cumsum(blocks) - blocks
        self._host[:] = 0
        for index, (first, count) in enumerate(zip(firsts.tolist(), blocks.tolist(), strict=True)):
            self._host[index, :count] = np.arange(first, first + count)
        self._device.upload(self._host, self.tensor)


class Segments(AttentionMetadata):
    """The rows of a slice, in segments of one kind."""

    row_slots: Tensor
    slot_mapping: Tensor
    slot_mappings: Sequence[Tensor]
    row_numbers: Tensor
    row_cosines: Tensor
    row_sines: Tensor

    def __init__(self, device: Device, tables: Tables, max_rows: int, row_tile: int) -> None:
        super().__init__(device, Room(max_rows + 1, max_rows, row_tile))
        self._tables, self._dummy_slot = tables, tables.dummy_slot
        self.block_tables = (tables.tensor,)
        self.add("row_slots", max_rows)
        self.add("slot_mapping", max_rows)
        self.slot_mappings = (self.slot_mapping,)

    def set_rows(self, begin: int, end: int, num_padded: int) -> None:
        """Set rows [begin, end) of the call, with `num_padded` rows after them."""
        lengths, ends = self._tables.lengths, self._tables.ends
        slots = np.arange(np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end) + 1)
        lengths, ends = lengths[slots], ends[slots]
        starts = np.maximum(begin - ends + lengths, 0)
        counts = np.minimum(end - ends, 0) + lengths - starts
        if num_padded:
            slots, starts = np.append(slots, self._dummy_slot), np.append(starts, 0)
            lengths, counts = np.append(lengths, num_padded), np.append(counts, num_padded)
        offsets = self._set_sequences(slots, starts, counts)
        self.set("positions", np.arange(self.num_tokens) + (starts - offsets[:-1]).repeat(counts))
        self.set("row_slots", slots.repeat(counts), self._dummy_slot)
        self._set_bounds((np.zeros(self.num_tokens, np.int32), lengths.repeat(counts) - 1))
        if self._row_tile > 1:
            self._set_whole(slots, lengths)

    def _set_whole(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Attend to the keys of whole segments, not only those up to the rows."""
        self.set("context_lengths", lengths)
        self.num_key_splits = -(-int(lengths.max()) // KEY_SPLIT)
        of_slots = np.ones(self._dummy_slot + 1, np.int32)
        of_slots[slots] = lengths
        self.set("tile_contexts", of_slots[self._host["tile_slots"][: self.num_tiles]], 1)


class SliceInputs:
    """The rows of a slice, from row `begin` of the call on; their merged rows, and pairs if two frames become one."""

    def __init__(self, whole: EncoderInputs, begin: int) -> None:
        config, device = whole.config, whole.device
        self._whole, self._begin = whole, begin
        self.cache = whole.cache
        max_rows = whole.slice_rows
        self.pictures = Segments(device, whole.picture_tables, max_rows, device.ops.row_tile)
        self.windows = self.pictures
        if whole.window_tables is not whole.picture_tables:
            self.windows = Segments(device, whole.window_tables, max_rows, device.ops.row_tile)
        self._host = {
            "row_numbers": np.arange(max_rows, dtype=np.int32),
            "row_cosines": np.zeros((max_rows, config.head_dim), np.float32),
            "row_sines": np.zeros((max_rows, config.head_dim), np.float32),
            "hidden": np.zeros((max_rows, config.hidden_size), np.float32),
            "pair_ids": np.zeros(2 * max_rows // whole.merged_rows, np.int32),
        }
        self._tensors = {name: device.tensor(host) for name, host in self._host.items()}
        for segments in (self.pictures, self.windows):
            for name in ("row_numbers", "row_cosines", "row_sines"):
                setattr(segments, name, self._tensors[name])
        self._merged_counter, self._token_counter, self._pair_counter = (np.zeros(1, np.int32) for _ in range(3))
        self.num_tokens = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Return the first row and the end of the last, without padding."""
        return self._begin, min(self._begin + self._whole.slice_rows, self._whole.num_rows)

    def set_rows(self, hidden: np.ndarray) -> None:
        """Set the rows, with their first hidden states [rows, hidden]."""
        whole, (begin, end) = self._whole, self.rows
        num_padded = whole.padded(end - begin) - (end - begin)
        for segments in dict.fromkeys((self.pictures, self.windows)):
            segments.set_rows(begin, end, num_padded)
        angles = [
            whole.angles.of(unit.rows[piece], unit.columns[piece])
            for unit, piece in ((whole.units[index].patches, piece) for index, _, piece in pieces(whole.units, begin, end))
        ]
        count = end - begin
        self._host["row_cosines"][:count] = np.concatenate([cosines for cosines, _ in angles])
        self._host["row_sines"][:count] = np.concatenate([sines for _, sines in angles])
        self._host["hidden"][:count] = hidden
        self._host["hidden"][count : count + num_padded] = 0
        self._merged_counter[0] = (count + num_padded) // whole.merged_rows
        self.num_tokens = count // whole.merged_rows
        for name in ("row_cosines", "row_sines", "hidden"):
            whole.device.upload(self._host[name], self._tensors[name])

    def set_pairs(self) -> bool:
        """Set pairs of tokens of two frames, which are in `whole.frames`; return whether there are any."""
        whole, size = self._whole, self._whole.slice_rows // self._whole.merged_rows
        first = self._begin // whole.merged_rows
        pairs = whole.pairs[first : first + size].ravel()
        tile = whole.device.ops.row_tile
        self.num_tokens = len(pairs) // 2
        self._token_counter[0] = -(-self.num_tokens // tile) * tile
        self._pair_counter[0] = 2 * self._token_counter[0]
        self._host["pair_ids"][: len(pairs)] = pairs
        self._host["pair_ids"][len(pairs) :] = 0
        whole.device.upload(self._host["pair_ids"], self._tensors["pair_ids"])
        return self.num_tokens > 0

    # ------------------------------------------------------------------------------------------------ as ops take them

    @property
    def hidden(self) -> Tensor:
        return self._rows_of("hidden", self._whole.slice_rows, self.pictures.host_counts[NUM_ROWS : NUM_ROWS + 1])

    def angles(self, ops: OpTable) -> object:
        return ops.rotary_angles(self.pictures, self._whole.rotary)  # type: ignore[arg-type]

    def merged(self, ops: OpTable, h: Tensor) -> Tensor:
        """Place the patches of each square side by side."""
        return ops.join_rows(h, self._whole.merged_rows, self._merged_counter)

    def means(self, ops: OpTable, h: Tensor) -> Tensor:
        """Return the mean of the patches of each square."""
        return ops.mean_rows(h, self._whole.merged_rows, self._merged_counter)

    def paired(self, ops: OpTable) -> Tensor:
        """Place the tokens of two frames side by side."""
        ids = self._rows_of("pair_ids", len(self._host["pair_ids"]), self._pair_counter)
        return ops.join_rows(ops.take_rows(self._whole.frames, ids), 2, self._token_counter)

    def _rows_of(self, name: str, limit: int, counter: np.ndarray) -> Tensor:
        host = self._host[name]
        if not self._whole.is_recorded:
            return self._tensors[name][: int(counter[0])]
        return Array(Rows(limit, counter), 1 if host.ndim == 1 else host.shape[1], int(host.ctypes.data), host)


class EncoderInputs:
    """Inputs of all slices. `is_recorded`: for a plan that records ops and reads numbers of rows from memory. `slice_rows`:
    patches. `kv_dtype`: of keys and values, "float32" or "bfloat16"."""

    def __init__(
        self,
        device: Device,
        config: VisionConfig,
        max_rows: int,
        max_segments: int,
        slice_rows: int,
        is_recorded: bool,
        kv_dtype: str,
    ) -> None:
        row_tile = device.ops.row_tile
        self.max_rows, self.max_segments = max_rows, max_segments
        self.device, self.config, self.is_recorded = device, config, is_recorded
        self.merged_rows = config.spatial_merge_size**2
        # whole tiles of patches, of merged ones, and of their pairs
        self._unit = row_tile * self.merged_rows * config.temporal_merge_size if row_tile > 1 else self.merged_rows
        self.slice_rows = self.padded(slice_rows)
        self.picture_tables = Tables(device, max_segments, max_rows)
        self.window_tables = Tables(device, max_segments, max_rows) if config.window_size else self.picture_tables
        self.angles = Angles(
            config.head_dim,
            config.rope_theta,
            _MAX_PLACES,
            is_alternating=config.has_alternating_frequencies,
            are_halves=config.rotates_halves,
        )
        partners = device.tensor(partners_of(config.head_dim, are_halves=config.rotates_halves))
        self.rotary = Rotary(config.head_dim, partners=partners, is_by_row=True)
        self.cache = self._make_cache(kv_dtype)
        self.units: Sequence[UnitPatches] = []
        self.num_rows = 0  # patches without padding
        self.pairs = np.zeros((0, 2), np.int32)  # rows of the two frames of each token
        width = self.merged_rows * config.hidden_size if config.temporal_merge_size > 1 else 0
        self._frames = np.zeros((max_rows // self.merged_rows, width), np.float32)
        self.frames: Tensor = Array(Rows(len(self._frames)), width, int(self._frames.ctypes.data), self._frames)

    def _make_cache(self, dtype: str) -> KvCache:
        """Allocate keys and values of two layers."""
        ops, config = self.device.ops, self.config
        num_blocks = -(-self.max_rows // _BLOCK_SIZE) + self.max_segments + 1
        block_bytes = _BLOCK_SIZE * config.num_kv_heads * config.head_dim * (4 if dtype == "float32" else 2)
        views = [ops.cache_view(np.zeros((num_blocks, block_bytes), np.uint8), _BLOCK_SIZE) for _ in range(4)]
        tensors = list(map(self.device.tensor, views))
        layers = [LayerCache(tensors[index], tensors[index + 1], _BLOCK_SIZE, dtype) for index in (0, 2)]
        return KvCache(_BLOCK_SIZE, layers)

    def unit_patches(self, frames: int, height: int, width: int) -> UnitPatches:
        """Return a unit of `frames` grids of patches."""
        config = self.config
        window = config.window_size // config.merged_pixels
        return UnitPatches(frames, height, width, patches_of(height, width, config.spatial_merge_size, window))

    @staticmethod
    def num_segments(units: Sequence[UnitPatches]) -> int:
        """Return the larger number of segments of the two kinds."""
        return sum(unit.frames * len(unit.patches.window_lengths) for unit in units) + 1

    def padded(self, num_rows: int) -> int:
        return -(-num_rows // self._unit) * self._unit

    @property
    def num_slices(self) -> int:
        return -(-self.num_rows // self.slice_rows)

    def set_units(self, units: Sequence[UnitPatches]) -> None:
        """Set the units of a call; the rows of its slices are set one by one."""
        self.units, self.num_rows = units, sum(unit.num_rows for unit in units)
        assert self.num_rows <= self.max_rows, f"{self.num_rows} patches, room for {self.max_rows}"
        self.picture_tables.set_lengths(np.concatenate([[unit.height * unit.width] * unit.frames for unit in units]))
        if self.window_tables is not self.picture_tables:
            self.window_tables.set_lengths(
                np.concatenate([np.tile(unit.patches.window_lengths, unit.frames) for unit in units])
            )

    def set_frames(self, frames: np.ndarray) -> None:
        """Keep the encoder's results of each square of patches, [squares, width]. A pair of frames has the tokens of both side
        by side; a picture has its own twice."""
        pairs, begin = [], 0
        for unit in self.units:
            count = unit.height * unit.width // self.merged_rows
            first = np.arange(begin, begin + count)
            pairs.append(np.stack([first, first + count * (unit.frames - 1)], axis=1))
            begin += count * unit.frames
        self.pairs = np.concatenate(pairs)
        self._frames[: len(frames)] = frames
        if not self.is_recorded:
            self.frames = self.device.tensor(self._frames[: len(frames)])


assert ROW_TILE % 2 == 0, "tiles hold whole pairs"
