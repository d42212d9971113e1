"""`tokamak bench comm` runs both routes at every size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "tools.cli", "bench", "comm"]


@pytest.mark.slow
def test_benchmark_measures_both_routes() -> None:
    arguments = ["--sizes", "4096", "1048576", "--rounds", "1", "--json"]
    done = subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, text=True, timeout=300)
    rows = json.loads(done.stdout)
    assert [(row["op"], row["bytes"]) for row in rows] == [
        (op, size) for op in ("all_gather", "all_reduce") for size in (4096, 1048576)
    ]
    assert all(row["tokamak_us"] > 0 and row["gloo_us"] > 0 for row in rows)


def test_invalid_options_are_named() -> None:
    done = subprocess.run([*COMMAND, "--sizes", "6"], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "multiples of 4" in done.stderr
