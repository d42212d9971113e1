"""Encoders against transformers, and against themselves: alone, packed, cut between layers, op by op."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.golden.make_units import MODELS, UNITS
from tests.paths import GOLDEN
from tests.workers.encoders.serving import Unit, encoded, load_tower
from workers.devices.device import Device, HostDevice


@pytest.fixture(scope="module", params=["native", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "native":
        yield HostDevice(2, [], {})
        return
    from workers.devices.paddle import PaddleDevice

    yield PaddleDevice("cpu")


def units_of(name: str) -> list[Unit]:
    with np.load(GOLDEN / name / "units.npz") as found:
        return [unit for unit in UNITS if "x".join(map(str, unit)) in found]


def expected(name: str) -> dict[Unit, np.ndarray]:
    with np.load(GOLDEN / name / "units.npz") as found:
        return {unit: found["x".join(map(str, unit))] for unit in units_of(name)}


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_transformers(name: str, device: Device) -> None:
    found = encoded(load_tower(GOLDEN / name, device), device, units_of(name))
    for unit, features in expected(name).items():
        assert np.abs(found[unit] - features).max() < 1e-4, unit


@pytest.mark.parametrize("name", MODELS)
def test_a_unit_alone(name: str, device: Device) -> None:
    """Bit for bit what it is among others, in any order, and with the call cut anywhere."""
    tower, units = load_tower(GOLDEN / name, device), units_of(name)
    packed = encoded(tower, device, units)
    for others in ([units[1]], units[::-1], [units[2], units[0]]):
        for unit, features in encoded(tower, device, others).items():
            np.testing.assert_array_equal(features, packed[unit])
    for cuts in ([1], list(range(1, tower.config.depth))):
        for unit, features in encoded(tower, device, units, cuts).items():
            np.testing.assert_array_equal(features, packed[unit])
    for unit, features in encoded(tower, device, units[1:3], [1], plan="eager").items():
        np.testing.assert_array_equal(features, packed[unit])
