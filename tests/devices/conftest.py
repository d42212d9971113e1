"""The plugin and the stand-in for NVIDIA's driver, built once for all of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.build import built_plugin
from tests.native_program import build_program


@pytest.fixture(scope="session")
def plugin() -> Path:
    return built_plugin()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("driver")
    return str(build_program(directory, "tests/devices/libcuda.cpp", flags=("-shared", "-fPIC")))
