"""Threads are bound to cores only if cores are left for the other actors and no other process uses these."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workers.devices.cores import rank_cores

BIND = """
import os
from ops import _cpu
core = max(os.sched_getaffinity(0))
_cpu.set_num_threads(1, [core])
print(os.sched_getaffinity(0) == {core})
"""


@pytest.mark.parametrize(
    ("rank", "num_ranks", "num_threads", "allowed", "num_cores", "expected"),
    [
        (0, 1, 2, {0, 1}, 2, []),  # the other actors run there too
        (0, 1, 2, {0, 1, 2, 3}, 4, []),  # another engine may have chosen the same
        (0, 1, 2, {9, 5, 7}, 16, [5, 7]),
        (0, 1, 3, {9, 5, 7}, 16, []),
        (0, 1, 4, {9, 5, 7}, 16, []),
        (1, 2, 2, {0, 1, 2, 3, 4}, 5, [2, 3]),
        (1, 2, 2, {0, 1, 2, 3}, 4, []),
    ],
)
def test_ranks_share_the_allowed_cores(
    rank: int, num_ranks: int, num_threads: int, allowed: set[int], num_cores: int, expected: list[int]
) -> None:
    assert rank_cores(rank, num_ranks, num_threads, allowed, num_cores) == expected


def test_bound_thread_stays_on_its_core() -> None:
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout == "True\n"
