"""The doorbell alone, at full speed."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "doorbell_stress.cpp"


def test_no_wake_is_lost_in_the_narrowest_window(tmp_path: Path) -> None:
    """Without either of the two fences this loses several wakes in a few hundred thousand rounds (seen on x86-64)."""
    program = tmp_path / "doorbell_stress"
    subprocess.run(["g++", "-std=c++17", "-O2", "-o", program, SOURCE], check=True)
    done = subprocess.run([program, "120000"], check=True, capture_output=True, text=True, timeout=500)
    assert int(done.stdout) == 0
