"""Builds and runs the C++ programs of the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.paths import REPOSITORY


def build_program(directory: Path, source: str, *others: str, flags: Sequence[str] = ()) -> Path:
    """Build a program from `source` and `others`, all below the repository."""
    program = directory / Path(source).stem
    sources = [REPOSITORY / name for name in (source, *others)]
    subprocess.run(["g++", "-std=c++17", "-O2", *flags, "-pthread", "-o", program, *sources], check=True)
    return program


def run_program(directory: Path, argument: str, source: str, *others: str) -> str:
    """Return a program's output; it must end with success."""
    program = build_program(directory, source, *others)
    return subprocess.run([program, argument], check=True, capture_output=True, text=True, timeout=500).stdout
