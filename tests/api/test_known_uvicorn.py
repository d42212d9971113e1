"""A version of uvicorn that the connections do not support ends the start with a message that names it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from api.known_uvicorn import END_VERSION, MIN_VERSION, check_version
from engine.errors import StartError
from tests.paths import REPOSITORY


@pytest.mark.parametrize("version", ["0.30.0", "0.54.9", "0.54.0.dev1"])
def test_known_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.5", "0.55.0", "1.0.0", "0.x"])
def test_unknown_versions_are_named(version: str) -> None:
    with pytest.raises(StartError, match=f"uvicorn {version} is installed.*>=0.30,<0.55"):
        check_version(version)


def test_bounds_match_pyproject() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    found = re.search(r'"uvicorn>=([0-9]+)[.]([0-9]+),<([0-9]+)[.]([0-9]+)"', text)
    assert found is not None
    assert (*MIN_VERSION, *END_VERSION) == tuple(map(int, found.groups()))


def test_unknown_version_ends_the_start() -> None:
    code = "import uvicorn; uvicorn.__version__ = '0.99.1'; import api.server"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "StartError: uvicorn 0.99.1 is installed" in done.stderr
