"""Placement of experts on ranks: the placement that all ranks of a rank group share, and the rule of which rank computes what.
Pure.

A layer's placement has each expert on one rank at least, on none twice, and as many on a rank as on any other or one fewer.
Every rank can compute any expert (it maps the weights of all), so a placement moves work, not ownership: (placement, members)
alone decide which ranks replace a missing one, the same on all ranks and without messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LayerPlacement = tuple[tuple[int, ...], ...]  # the experts of each rank, ascending


def linear(num_experts: int, num_ranks: int, num_slots: int) -> LayerPlacement:
    """Neighbours lie on one rank; after the last expert come the first again, as replicas."""
    ends = [num_slots * (rank + 1) // num_ranks for rank in range(num_ranks)]
    begins = [0, *ends]
    return sorted_by_rank([slot % num_experts for slot in range(begin, end)] for begin, end in zip(begins, ends, strict=False))


def round_robin(num_experts: int, num_ranks: int, num_slots: int) -> LayerPlacement:
    """Neighbours lie on different ranks. Where the ranks' turn and the experts' begin together again, the ranks' is shifted by
    one: else replicas would lie where their expert is."""
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
    """The placement on those ranks that are there: experts that lie nowhere else go to who has the fewest, the lower rank
    first."""
    assert members, "a rank group without members computes nothing"
    left = [set(experts) if rank in members else set() for rank, experts in enumerate(placement)]
    lost = {expert for experts in placement for expert in experts}.difference(*left)
    for expert in sorted(lost):
        left[min(members, key=lambda rank: (len(left[rank]), rank))].add(expert)
    return sorted_by_rank(left)


def owners(placement: LayerPlacement, num_experts: int) -> np.ndarray:
    """int32 [experts, 1 + ranks], as the ops read it: on how many ranks an expert lies, and on which, ascending."""
    import numpy as np  # the supervisor starts without it where no experts are shared

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
    """Return the placement before any expert moved, the same for each layer."""
    return FIRST_PLACEMENTS[strategy](num_experts, num_ranks, num_experts + num_redundant)


def owner(table: np.ndarray, expert: int, home: int, row: int) -> int:
    """The one rank that computes `expert` for row `row` of rank `home`. Replicas take turns over the rows; homes begin at
    different ones, so that single rows of many homes do not meet on one."""
    count = int(table[expert, 0])
    return int(table[expert, 1 + (home + row) % count])
