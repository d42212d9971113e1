"""Ranks on the machine's memory nodes: the node of each, and processes and threads that stay there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.process.nodes import Seat, memory_nodes, seat_of

TWO = [(0, 1, 4, 5), (2, 3, 6, 7)]
BIND = """
import os, sys, threading
import msgspec
from engine.process.nodes import bind_to_node
from tests.configurations import engine_config

core = max(os.sched_getaffinity(0))
given = {"model": "/none", "max_model_len": 64, "num_kv_blocks": 4, "run_id": "0", "run_dir": "/none"}
config = engine_config(**given, memory_nodes=((core + 1,), (core,)), tensor_parallel_size=2, data_parallel_size=2)
bind_to_node(sys.argv[1], config)
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
print(found[0] == os.sched_getaffinity(0), len(found[0]))
"""


@pytest.mark.parametrize(
    ("rank", "num_ranks", "expected"),
    [
        (0, 1, Seat(0, 0, 1, TWO[0])),
        (0, 2, Seat(0, 0, 1, TWO[0])),
        (1, 2, Seat(1, 0, 1, TWO[1])),
        (1, 4, Seat(0, 1, 2, TWO[0])),
        (2, 4, Seat(1, 0, 2, TWO[1])),
        (3, 4, Seat(1, 1, 2, TWO[1])),
        (1, 3, Seat(0, 1, 2, TWO[0])),
        (2, 3, Seat(1, 0, 1, TWO[1])),
    ],
)
def test_node_of_a_rank(rank: int, num_ranks: int, expected: Seat) -> None:
    assert seat_of(rank, num_ranks, TWO) == expected


@pytest.mark.parametrize("num_nodes", range(1, 9))
@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_ranks_are_spread_evenly(num_ranks: int, num_nodes: int) -> None:
    nodes = [(number,) for number in range(num_nodes)]
    seats = [seat_of(rank, num_ranks, nodes) for rank in range(num_ranks)]
    assert len({(seat.node, seat.place) for seat in seats}) == num_ranks
    assert all(seat.place < seat.count for seat in seats)
    assert max(seat.count for seat in seats) == -(-num_ranks // num_nodes)  # as evenly as can be
    assert [seat.node for seat in seats] == sorted(seat.node for seat in seats)


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    for name, cores in (("node0", "0-1,8-9"), ("node1", "2-3,10-11"), ("node10", "7"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cores}\n")
    assert memory_nodes(range(12), tmp_path) == [[0, 1, 8, 9], [2, 3, 10, 11], [7]]
    assert memory_nodes({3, 7, 11}, tmp_path) == [[3, 11], [7]]
    assert memory_nodes({5, 4}, tmp_path / "none") == [[4, 5]]


def test_nodes_of_this_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert sorted(core for cores in memory_nodes(allowed) for core in cores) == sorted(allowed)


@pytest.mark.parametrize(("actor", "is_bound"), [("worker2", True), ("worker3", True), ("cache1", True), ("scheduler1", False)])
def test_a_process_stays_on_its_node(actor: str, is_bound: bool) -> None:
    """Four ranks on two nodes; the second node is a core of this machine."""
    done = subprocess.run([sys.executable, "-c", BIND, actor], capture_output=True, text=True, check=False)
    assert done.stdout == f"True {1 if is_bound else len(os.sched_getaffinity(0))}\n", done.stderr
