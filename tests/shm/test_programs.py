"""Doorbell and ring alone, at full speed, without Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native_program import run_program

pytestmark = pytest.mark.slow


def test_no_wake_is_lost_in_the_narrowest_window(tmp_path: Path) -> None:
    """Several wakes are lost in a few hundred thousand rounds if either of the two fences is missing (seen on x86-64)."""
    assert int(run_program(tmp_path, "120000", "tests/shm/native/doorbell_stress.cpp")) == 0


def test_a_ring_between_two_threads(tmp_path: Path) -> None:
    assert run_program(tmp_path, "200000", "tests/shm/native/ring_stress.cpp") == "0 wrong of 200000\n"
