"""Calls of the encoder: continuation of split calls, features that arrive encoded, and ranks that divide units."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from ops.weight_format import bfloat16_bits
from shm.encoder_arena import EncoderArena
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers.encoders.serving import Unit, Units, encoded, load_tower
from workers.devices.device import HostDevice
from workers.encoders.tower import Tower
from workers.extensions.media.encoder import Encoder

NAME = "qwen3_vl"
UNITS: list[Unit] = [(1, 10, 14), (1, 4, 22), (2, 6, 4)]


@pytest.fixture(scope="module")
def device() -> HostDevice:
    return HostDevice(2, [], {})


@pytest.fixture(scope="module")
def tower(device: HostDevice) -> Tower:
    return load_tower(GOLDEN / NAME, device)


def test_ranks_divide_the_units(tower: Tower, device: HostDevice) -> None:
    """Each writes its own into the one arena; together they equal those of one rank."""
    alone, made = encoded(tower, device, UNITS), Units(tower, UNITS)
    written = []
    for place in range(2):
        encoder = Encoder(tower, device, made.arena, 7, place=place, num_ranks=2)
        before = set(made.arena.headers)
        for first in range(made.num_parts):
            encoder.run(made.call(first, first + 1), made.pixels if first == 0 else {})
        written.append(set(made.arena.headers) - before)
    assert all(written)
    assert not written[0] & written[1]
    for unit, features in made.features().items():
        np.testing.assert_array_equal(features, alone[unit])
    idle = Encoder(tower, device, made.arena, 7, place=2, num_ranks=5)
    for first in range(made.num_parts):
        idle.run(Units(tower, UNITS[:2]).call(first, first + 1), made.pixels if first == 0 else {})


def test_interrupted_call_continues(tower: Tower, device: HostDevice) -> None:
    """No other life or call can continue it; a call may always begin again."""
    alone, made = encoded(tower, device, UNITS), Units(tower, UNITS)
    encoder = Encoder(tower, device, made.arena, 7)
    assert not encoder.goes_on_with(made.call(1))
    encoder.run(made.call(0, 2), made.pixels)
    assert encoder.goes_on_with(made.call(2))
    assert not encoder.goes_on_with(made.call(3))
    other = made.call(2)
    other.call_id = 9
    assert not encoder.goes_on_with(other)
    with pytest.raises(AssertionError, match="expected call and part"):
        encoder.run(other, {})
    assert encoder.goes_on_with(made.call(0, 1))
    encoder.run(made.call(), made.pixels)
    assert not encoder.goes_on_with(made.call(3))
    for unit, features in made.features().items():
        np.testing.assert_array_equal(features, alone[unit])


def test_larger_call_after_a_smaller_one(tower: Tower, device: HostDevice) -> None:
    """The plan is remade with more room and gives the same result."""
    many: list[Unit] = [(1, 2, 2 * columns) for columns in range(1, 40)]
    made = Units(tower, [*UNITS, *many])
    encoder = Encoder(tower, device, made.arena, 7)
    small = Units(tower, UNITS[:1])
    encoder.run(small.call(), small.pixels)
    alone = np.array(made.features()[UNITS[0]])  # the same rows in both
    encoder.run(made.call(), made.pixels)
    assert np.abs(alone).max() > 0
    np.testing.assert_array_equal(made.features()[UNITS[0]], alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoded_features_are_stored_in_the_arena(tower: Tower, device: HostDevice, dtype: str, tmp_path: Path) -> None:
    """Features are stored in the arena as if encoded here, beside others."""
    made = Units(tower, UNITS)
    expected = encoded(tower, device, UNITS)
    made.encodes[1] = msgspec.structs.replace(made.encodes[1], is_features=True)
    made.pixels[made.encodes[1].unit_hash] = expected[UNITS[1]]
    shape = (len(made.arena.rows), tower.config.feature_width, dtype)
    arena = EncoderArena(MemoryFile.create("encoder", EncoderArena.num_bytes_of(*shape)), *shape)
    Encoder(tower, device, arena, 3).run(made.call(), made.pixels)
    for unit, encode in zip(UNITS, made.encodes, strict=True):
        assert arena.is_valid(encode.first_row, encode.unit_hash, encode.num_rows, 3)
        rows: np.ndarray = arena.rows[encode.first_row : encode.first_row + encode.num_rows]
        wanted = expected[unit]
        if dtype == "bfloat16":
            wanted = np.empty(rows.shape, np.uint16)
            bfloat16_bits(expected[unit], wanted)
        np.testing.assert_array_equal(rows, wanted)
    arena.close()


def test_wrong_pixels_fail_an_assertion(tower: Tower, device: HostDevice) -> None:
    """Rows that do not match the grid are an error as well."""
    made = Units(tower, UNITS[:1])
    encoder = Encoder(tower, device, made.arena, 7)
    (key,) = made.pixels
    for wrong in (made.pixels[key][:, :16], np.repeat(made.pixels[key], 3, axis=0), made.pixels[key].astype(np.float32)):
        with pytest.raises(AssertionError, match="pixels"):
            encoder.run(made.call(), {key: wrong})
    made.encodes[0].num_rows += 1
    with pytest.raises(AssertionError, match="has 36 rows"):
        encoder.run(made.call(), made.pixels)
