"""Builds and runs the C++ programs of the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.paths import REPOSITORY


def run_program(directory: Path, argument: str, source: str, *others: str) -> str:
    """What the program of `source` (and `others`, all below the repository) prints; it must end well."""
    program = directory / Path(source).stem
    sources = [REPOSITORY / name for name in (source, *others)]
    subprocess.run(["g++", "-std=c++17", "-O2", "-pthread", "-o", program, *sources], check=True)
    return subprocess.run([program, argument], check=True, capture_output=True, text=True, timeout=500).stdout
