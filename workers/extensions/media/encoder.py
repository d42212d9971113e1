"""Pictures and video to features: encoder calls, cut into parts, that write into the encoder arena.

Owned by the runner of a rank and, like it, independent of processes and clocks. A call begins with the pixels of its units and
part 0; later steps continue it, and the last one writes the features and their headers. The features of a unit depend only on
the unit: not on the other units of the call, its cuts, or the number of threads. With several ranks, each encodes some of the
units into the one arena of the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from engine.checkpoint.vision_config import VisionConfig
from engine.messages.media import SLICE_ROWS, Encode, EncoderCall
from ops.cpu.executors import Tape
from ops.modules import AxisPositionTables, PositionTable
from ops.weight_format import bfloat16_bits
from workers.devices.device import Device
from workers.encoders.tower import Tower
from workers.engine.plan import telling
from workers.extensions.media.encoder_inputs import EncoderInputs, UnitPatches, pieces
from workers.extensions.media.encoder_plans import Plan
from workers.extensions.media.geometry import Patches, added_positions, pixels_of, stretched

_LEAST_ROWS, _LEAST_SEGMENTS = 1024, 64


class Arena(Protocol):
    """Memory of features (`shm.encoder_arena.EncoderArena`)."""

    @property
    def rows(self) -> np.ndarray: ...
    def begin(self, first_row: int) -> None: ...
    def publish(self, first_row: int, unit_hash: bytes, num_rows: int, version: int) -> None: ...


class _Unit(msgspec.Struct, frozen=True):
    encode: Encode
    patches: UnitPatches
    frames: np.ndarray


class Encoder:
    """Encoder with the weights `tower` of number `version`. `plan` and `on_op`: as for `make_plan`. `slice_rows`: rows of
    features computed at a time."""

    def __init__(
        self,
        tower: Tower,
        device: Device,
        arena: Arena,
        version: int,
        plan: str = "tape",
        place: int = 0,
        num_ranks: int = 1,
        on_op: Callable[[], None] = lambda: None,
        slice_rows: int = SLICE_ROWS,
    ) -> None:
        self.config: VisionConfig = tower.config
        self._tower, self._device, self._arena, self._version = tower, device, arena, version
        self._is_recorded = plan != "eager" and device.ops.name == "native"
        self._ops = device.ops if device.ops.name == "native" else telling(device.ops, on_op)
        self._place, self._num_ranks = place, num_ranks
        self._slice_rows = slice_rows * self.config.spatial_merge_size**2
        is_narrow = device.ops.name == "native" and tower.blocks[0].qkv.format.kind != "float32"
        self._kv_dtype = "bfloat16" if is_narrow else "float32"  # from the weights, like the text model's
        self._plan = self._make_plan(_LEAST_ROWS, _LEAST_SEGMENTS)
        self._plan.slice_of(-(-_LEAST_ROWS // self._plan.inputs.slice_rows) - 1)
        self._units: list[_Unit] = []  # units of this rank in the current call
        self._next = (-1, 0)  # id of the current call, and its next part

    def _make_plan(self, max_rows: int, max_segments: int) -> Plan:
        room = max_rows, max_segments, self._slice_rows
        inputs = EncoderInputs(self._device, self.config, *room, self._is_recorded, self._kv_dtype)
        return Plan(self._tower, self._ops, inputs)

    @property
    def tapes(self) -> list[Tape]:
        """Return the tapes of the last call's slices, for profiles."""
        return self._plan.tapes

    def goes_on_with(self, call: EncoderCall) -> bool:
        """Whether this rank has the state after the parts before `call`; a restarted rank does not."""
        return call.first_part == 0 or self._next == (call.call_id, call.first_part)

    def run(self, call: EncoderCall, pixels: Mapping[bytes, np.ndarray]) -> None:
        """Run parts of a call. `pixels` of each unit by hash, with part 0: uint8 [frames, H, W, 3], or float32 [num_rows,
        feature_width] if the unit is already features."""
        if call.first_part == 0:
            self._begin(call, pixels)
        assert self._next == (call.call_id, call.first_part), (
            f"parts from {call.first_part} of encoder call {call.call_id} arrived, expected call and part {self._next}"
        )
        self._next = (call.call_id, call.last_part)
        if self._units:
            self._run_parts(call)
        if call.is_last:
            self._write_features()
            self._units, self._next = [], (-1, 0)

    def _run_parts(self, call: EncoderCall) -> None:
        """Run this rank's slices of each pass that are due by now. There may be fewer or more slices than parts."""
        count, per_pass = self._plan.inputs.num_slices, call.num_parts // self.config.num_passes
        for part in range(call.first_part, call.last_part):
            index, place = divmod(part, per_pass)
            for number in range(place * count // per_pass, (place + 1) * count // per_pass):
                if index == 0:
                    inputs = self._plan.slice_of(number).inputs
                    inputs.set_rows(self._embedded(*inputs.rows))
                self._plan.run(index, number)

    def _begin(self, call: EncoderCall, pixels: Mapping[bytes, np.ndarray]) -> None:
        own = _shares(call.units, self._num_ranks)[self._place]
        for encode in (unit for unit in own if unit.is_features):
            self._write(encode, pixels[encode.unit_hash])
        self._units = [self._unit(encode, pixels[encode.unit_hash]) for encode in own if not encode.is_features]
        self._next = (call.call_id, 0)
        assert call.num_parts % self.config.num_passes == 0, f"{call.num_parts} parts of {self.config.num_passes} passes"
        if not self._units:
            return
        patches = [unit.patches for unit in self._units]
        rows = sum(unit.num_rows for unit in patches)
        segments = EncoderInputs.num_segments(patches)
        inputs = self._plan.inputs
        if rows > inputs.max_rows or segments > inputs.max_segments:
            self._plan = self._make_plan(_room(rows, inputs.max_rows), _room(segments, inputs.max_segments))
        self._plan.inputs.set_units(patches)

    def _unit(self, encode: Encode, frames: np.ndarray) -> _Unit:
        config, patch = self.config, self.config.patch_size
        expected = (encode.height * patch, encode.width * patch, 3)
        count = len(frames)
        assert frames.dtype == np.uint8, f"pixels are {frames.dtype}"
        text = f"unit {encode.unit_hash.hex()} has pixels {list(frames.shape)}, expected "
        assert frames.shape[1:] == expected, f"{text}frames of {list(expected)}"
        assert count in (1, config.frames_per_unit), f"{text}1 or {config.frames_per_unit} frames"
        num_tokens = config.num_tokens_of(encode.height, encode.width)
        assert encode.num_rows == num_tokens, f"a unit of {num_tokens} tokens has {encode.num_rows} rows"
        grids = -(-count // config.temporal_patch_size)
        return _Unit(encode, self._plan.inputs.unit_patches(grids, encode.height, encode.width), frames)

    def _embedded(self, begin: int, end: int) -> np.ndarray:
        """Return the first hidden states of rows [begin, end) of the call, float32 [rows, hidden]."""
        tower, found = self._tower, []
        for index, grid, piece in pieces([unit.patches for unit in self._units], begin, end):
            unit = self._units[index]
            patches = unit.patches.patches.part(piece)
            per_patch = len(unit.frames) // unit.patches.frames
            frames = unit.frames[grid * per_patch : (grid + 1) * per_patch]
            pixels = pixels_of(frames, patches, self.config.patch_size)
            count = len(pixels)
            pixels = np.pad(pixels, ((0, -count % self._device.ops.row_tile), (0, 0)))
            embedded = self._ops.linear(self._device.tensor(pixels), tower.patches[per_patch]).numpy()[:count]
            if tower.positions is not None:
                embedded = embedded + _positions(tower.positions, patches, unit.patches)
            found.append(embedded)
        return np.concatenate(found)

    def _write_features(self) -> None:
        """Write the features into the arena, in token order."""
        if not self._units:
            return
        features = np.concatenate(self._plan.features(), axis=1)
        begin = 0
        for unit in self._units:
            tokens = unit.patches.patches.tokens
            ordered = np.empty((len(tokens), features.shape[1]), np.float32)
            ordered[tokens] = features[begin : begin + len(tokens)]
            self._write(unit.encode, ordered)
            begin += len(tokens)

    def _write(self, encode: Encode, features: np.ndarray) -> None:
        rows = self._arena.rows[encode.first_row : encode.first_row + encode.num_rows]
        if len(features) < encode.num_rows:  # rows of tokens between an image's rows are not read
            places = np.arange(len(features))
            spread = np.zeros((encode.num_rows, features.shape[1]), np.float32)
            spread[places + places // (encode.width // self.config.spatial_merge_size)] = features
            features = spread
        assert rows.shape == features.shape, f"features {list(features.shape)} for rows {list(rows.shape)}"
        self._arena.begin(encode.first_row)
        if rows.dtype == np.uint16:
            bfloat16_bits(features, rows)
        else:
            rows[...] = features
        self._arena.publish(encode.first_row, encode.unit_hash, encode.num_rows, self._version)


def _positions(table: PositionTable, patches: Patches, unit: UnitPatches) -> np.ndarray:
    """Return the learned positions of some patches of a unit."""
    assert table.values is not None
    if isinstance(table, AxisPositionTables):
        return added_positions(table.values, patches)
    return stretched(table.values, table.side, patches, unit.height, unit.width, table.has_aligned_corners)


def _shares(units: Sequence[Encode], num_ranks: int) -> list[list[Encode]]:
    """Return the units of each rank: largest first, each to the rank with the least work. Equal on every rank."""
    shares: list[list[Encode]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for unit in sorted(units, key=lambda unit: -unit.num_rows):
        place = work.index(min(work))
        shares[place].append(unit)
        work[place] += unit.num_rows
    return shares


def _room(needed: int, present: int) -> int:
    while present < needed:
        present *= 2
    return present
