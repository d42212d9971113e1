"""Fixtures of the scheduler's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path: that of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tokamak-test-") as name:
        yield Path(name)
