"""Memory nodes of ranks, on machines with several (--bind-memory-nodes).

The nodes are determined once, when options are resolved, and are part of the configuration. Ranks are spread evenly over them,
neighbours together, so that the ranks of a replica share a node where possible. A rank and its replica's cache actor run only
on the cores of their node, from `engine.process.main` on: Linux then places the memory that they touch first (KV arena,
activations, packed weights) in that node. Weights are kept once per node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.process.topology import CACHE, index_of, role_of

_NODES = Path("/sys/devices/system/node")


class Seat(msgspec.Struct, frozen=True):
    """A rank is number `place` of the `count` ranks on its node, which has these cores."""

    node: int
    place: int
    count: int
    cores: tuple[int, ...]


def seat_of(rank: int, num_ranks: int, nodes: Sequence[Sequence[int]]) -> Seat:
    """Return the seat of a rank. `nodes`: the cores of each."""
    homes = [rank * len(nodes) // num_ranks for rank in range(num_ranks)]
    node = homes[rank]
    return Seat(node, rank - homes.index(node), homes.count(node), tuple(nodes[node]))


def memory_nodes(allowed: Collection[int], directory: Path = _NODES) -> list[list[int]]:
    """Return the cores among `allowed` of each node that has some; one node if the kernel reports none."""
    nodes = []
    for path in sorted(directory.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        with contextlib.suppress(OSError):
            nodes.append(sorted(set(_cores((path / "cpulist").read_text())) & set(allowed)))
    return [cores for cores in nodes if cores] or [sorted(allowed)]


def bind_to_node(actor: str, config: EngineConfig) -> None:
    """Bind this process to its node if the actor is a rank, or a cache actor, which uses the node of its replica's first
    rank."""
    if role_of(actor) not in ("worker", CACHE) or not config.memory_nodes:
        return
    rank = index_of(actor) * (config.tensor_parallel_size if role_of(actor) == CACHE else 1)
    os.sched_setaffinity(0, seat_of(rank, config.num_ranks, config.memory_nodes).cores)


def _cores(text: str) -> list[int]:
    """Return the numbers in a list such as 0-3,8-11."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]
