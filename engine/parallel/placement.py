"""Placement of experts on ranks, the same for all ranks of a rank group, and which rank computes which expert. Pure.

A layer's placement has each expert on at least one rank and on none twice; numbers of experts per rank differ by at most one.
Every rank can compute any expert (it maps the weights of all), so a placement moves work, not ownership: (placement, members)
alone determine which ranks replace a missing one, the same on all ranks and without messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LayerPlacement = tuple[tuple[int, ...], ...]  # the experts of each rank, ascending


def linear(num_experts: int, num_ranks: int, num_slots: int) -> LayerPlacement:
    """Put neighbours on one rank; after the last expert the first ones follow again, as replicas."""
    ends = [num_slots * (rank + 1) // num_ranks for rank in range(num_ranks)]
    begins = [0, *ends]
    return sorted_by_rank([slot % num_experts for slot in range(begin, end)] for begin, end in zip(begins, ends, strict=False))


def round_robin(num_experts: int, num_ranks: int, num_slots: int) -> LayerPlacement:
    """Put neighbours on different ranks. If the cycles of ranks and experts coincide, the ranks' cycle is shifted by one, so
    that replicas are on other ranks than their expert."""
    experts: list[list[int]] = [[] for _ in range(num_ranks)]
    period = math.lcm(num_experts, num_ranks)
    for slot in range(num_slots):
        experts[(slot + slot // period) % num_ranks].append(slot % num_experts)
    return sorted_by_rank(experts)


FIRST_PLACEMENTS: dict[str, Callable[[int, int, int], LayerPlacement]] = {"linear": linear, "round_robin": round_robin}


def max_redundant_experts(num_experts: int, num_ranks: int) -> int:
    """Return the most redundant experts with which no expert is on a rank twice."""
    return num_experts * (num_ranks - 1)


def sorted_by_rank(experts: Iterable[Iterable[int]]) -> LayerPlacement:
    return tuple(tuple(sorted(some)) for some in experts)


def without_missing(placement: LayerPlacement, members: Collection[int]) -> LayerPlacement:
    """Return the placement on the present ranks: experts that are nowhere else go to the rank with the fewest, the lower one
    first."""
    assert members, "a rank group without members computes nothing"
    left = [set(experts) if rank in members else set() for rank, experts in enumerate(placement)]
    lost = {expert for experts in placement for expert in experts}.difference(*left)
    for expert in sorted(lost):
        left[min(members, key=lambda rank: (len(left[rank]), rank))].add(expert)
    return sorted_by_rank(left)


def owners(placement: LayerPlacement, num_experts: int) -> np.ndarray:
    """Return int32 [experts, 1 + ranks] for the ops: on how many ranks an expert is, and on which, ascending."""
    import numpy as np  # the supervisor starts without it if no experts are shared

    table = np.zeros((num_experts, 1 + len(placement)), np.int32)
    for rank, experts in enumerate(placement):
        for expert in experts:
            table[expert, 0] += 1
            table[expert, table[expert, 0]] = rank
    assert table[:, 0].all(), f"experts {np.flatnonzero(table[:, 0] == 0).tolist()} are not placed"
    return table


def placement_of(table: np.ndarray) -> LayerPlacement:
    """Return the placement with these owners."""
    ranks: list[list[int]] = [[] for _ in range(table.shape[1] - 1)]
    for expert, (count, *having) in enumerate(table.tolist()):
        for rank in having[:count]:
            ranks[rank].append(expert)
    return tuple(tuple(experts) for experts in ranks)


def first_placement(strategy: str, num_experts: int, num_ranks: int, num_redundant: int) -> LayerPlacement:
    """Return the initial placement, the same for each layer."""
    return FIRST_PLACEMENTS[strategy](num_experts, num_ranks, num_experts + num_redundant)


def owner(table: np.ndarray, expert: int, home: int, row: int) -> int:
    """Return the one rank that computes `expert` for row `row` of rank `home`. Replicas alternate by row, starting at a
    different one for each home, so that single rows of many homes do not all go to one."""
    count = int(table[expert, 0])
    return int(table[expert, 1 + (home + row) % count])
