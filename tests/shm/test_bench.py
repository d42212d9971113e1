"""`tokamak bench shm` runs, compares all three, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shm.segment import segment_names
from tools.bench.shm import TITLES

COMMAND = [sys.executable, "-m", "tools.cli", "bench", "shm"]


@pytest.mark.slow
def test_benchmark_measures_every_route_at_every_size() -> None:
    before = set(segment_names())
    arguments = ["--sizes", "64", "1048576", "--rounds", "1", "--count", "5", "--json"]
    done = subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert [(row["route"], row["bytes"]) for row in result["rows"]] == [
        (route, size) for size in (64, 1048576) for route in ("tokamak", "pyzmq", "mp.Queue")
    ]
    assert all(row[name] > 0 for row in result["rows"] for name in TITLES)
    assert set(result["idle_cpu_s"]) == {"tokamak", "pyzmq", "mp.Queue"}
    assert result["bar_ratio"] is None
    assert not [name for name in set(segment_names()) - before if name.endswith(".mailbox.bench")]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--sizes", "4"], "--sizes at least 8"), (["--check", "--sizes", "64"], "--check needs 256")]
)
def test_invalid_options_are_named(arguments: list[str], message: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
