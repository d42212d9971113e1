"""The pool of a rank alone, at full speed, without Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native_program import run_program

pytestmark = pytest.mark.slow


def test_every_task_runs_once_and_is_finished(tmp_path: Path) -> None:
    printed = run_program(tmp_path, "40000", "tests/ops/native/pool_stress.cpp", "ops/cpu/native/pool.cpp")
    assert printed == "0 wrong of 40000\n"
