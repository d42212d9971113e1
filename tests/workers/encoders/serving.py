"""An encoder with a golden checkpoint's weights, with an arena of its own, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.messages.media import SLICE_ROWS, Encode, EncoderCall
from ops.cpu import table as native
from ops.paddle import reference
from shm.slab import SlabHandle
from tests.golden.make_units import pixels_of
from workers.devices.device import Device
from workers.encoders.tower import Tower
from workers.extensions.media.encoder import Encoder
from workers.models.loading import load_model
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision

Unit = tuple[int, int, int]  # frames, and patches in height and width
_NOWHERE = SlabHandle(0, 0, 0, 0)


class PlainArena:
    """Encoder arena in plain memory; each row's header has the unit and the version."""

    def __init__(self, num_rows: int, width: int, dtype: type = np.float32) -> None:
        self.rows: np.ndarray = np.zeros((num_rows, width), dtype)
        self.headers: dict[int, tuple[bytes, int, int]] = {}

    def begin(self, first_row: int) -> None:
        self.headers.pop(first_row, None)

    def publish(self, first_row: int, unit_hash: bytes, num_rows: int, version: int) -> None:
        self.headers[first_row] = (unit_hash, num_rows, version)


def load_tower(path: Path, device: Device, precision: Precision | None = None) -> Tower:
    config = ModelConfig.read(path)
    loaded = load_model(
        path, config, device.ops, 256, lambda _done, _all: None, LoadOptions(precision=precision or Precision())
    )
    assert loaded.model.encoder is not None
    return loaded.model.encoder


def hash_of(unit: Unit) -> bytes:
    return bytes(unit).ljust(32, b"\0")


class Units:
    """Calls with these units, one after another in the arena; each pass has `parts_per_pass` parts."""

    def __init__(self, tower: Tower, units: Sequence[Unit], parts_per_pass: int = 1) -> None:
        self.units = units
        self.num_parts = tower.config.num_passes * parts_per_pass
        self.encodes: list[Encode] = []
        self.pixels = {hash_of(unit): pixels_of(*unit, tower.config.patch_size) for unit in units}
        begin = 0
        for unit in units:
            count = tower.config.num_tokens_of(*unit[1:])
            self.encodes.append(Encode(hash_of(unit), begin, count, *unit[1:], "media-0", _NOWHERE))
            begin += count
        self.arena = PlainArena(begin, tower.config.feature_width)

    def call(self, first_part: int = 0, last_part: int | None = None) -> EncoderCall:
        """Return a call of all parts, or those in [first_part, last_part)."""
        last_part = self.num_parts if last_part is None else last_part
        return EncoderCall(1, self.encodes, first_part, last_part, self.num_parts)

    def features(self) -> dict[Unit, np.ndarray]:
        return {
            unit: self.arena.rows[encode.first_row : encode.first_row + encode.num_rows]
            for unit, encode in zip(self.units, self.encodes, strict=True)
        }


def encoded(
    tower: Tower,
    device: Device,
    units: Sequence[Unit],
    cuts: Sequence[int] = (),
    plan: str = "tape",
    parts_per_pass: int = 1,
    slice_rows: int = SLICE_ROWS,
) -> dict[Unit, np.ndarray]:
    """Return features of the units in one call, which is split before the parts `cuts`."""
    made = Units(tower, units, parts_per_pass)
    encoder = Encoder(tower, device, made.arena, 7, plan, slice_rows=slice_rows)
    bounds = [0, *cuts, made.num_parts]
    for first, last in itertools.pairwise(bounds):
        encoder.run(made.call(first, last), made.pixels if first == 0 else {})
    assert set(made.arena.headers.values()) == {(encode.unit_hash, encode.num_rows, 7) for encode in made.encodes}
    return made.features()


TABLES = {"native": native.TABLE, "reference": reference.TABLE}
