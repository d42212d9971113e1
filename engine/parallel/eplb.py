"""Places experts so that all ranks have about the same number of rows: it replicates the busiest experts and packs all of them
onto the ranks. Pure; `workers/rank_group/balancer.py` calls it with the counts.

The method is DeepSeek's EPLB (2025): each further replica goes to the expert with the most rows per replica; then the heaviest
go first, each to the least loaded rank. If the model's groups of experts divide among nodes, groups are packed onto nodes
first, and replicas stay within them. In addition: no expert is on a rank twice; ranks may differ by one expert, so that nothing
must divide; ranks are assigned so that few experts move; a layer that gains little is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.parallel.placement import LayerPlacement, sorted_by_rank

Counts = Sequence[int]  # rows of each expert of a layer


class Topology(msgspec.Struct, frozen=True):
    """Ranks and experts of a placement. Nodes are close ranks, the same number in each. Groups are neighbouring experts, the
    same number in each; a row uses few of them."""

    num_ranks: int
    num_slots: int  # of all ranks
    num_nodes: int = 1
    num_groups: int = 1

    def is_in_nodes(self, num_experts: int) -> bool:
        parts = (self.num_groups, self.num_ranks, self.num_slots)
        divide = num_experts % self.num_groups == 0 and all(part % self.num_nodes == 0 for part in parts)
        return self.num_nodes > 1 and divide and self.num_slots <= num_experts * self.num_ranks // self.num_nodes


def imbalance(placement: LayerPlacement, counts: Counts) -> float:
    """Return the rows of the busiest rank divided by the mean; an expert's rows are split evenly among its replicas."""
    total = sum(counts)
    loads = loads_of(placement, counts)
    return max(loads) * len(loads) / total if total else 1.0


def loads_of(placement: LayerPlacement, counts: Counts) -> list[float]:
    """Return the rows of each rank."""
    copies = [0] * len(counts)
    for experts in placement:
        for expert in experts:
            copies[expert] += 1
    return [sum(counts[expert] / copies[expert] for expert in experts) for experts in placement]


def rebalanced(
    present: Sequence[LayerPlacement], counts: Sequence[Counts], topology: Topology, min_gain: float
) -> tuple[LayerPlacement, ...] | None:
    """Return the placement of each layer; None: there is no gain. A layer is changed only if max/mean falls by at least
    `min_gain`."""
    layers = []
    for placement, layer_counts in zip(present, counts, strict=True):
        best = balanced(placement, layer_counts, topology)
        gain = imbalance(placement, layer_counts) - imbalance(best, layer_counts)
        layers.append(best if gain > 0 and gain >= min_gain else placement)
    return None if layers == list(present) else tuple(layers)


def forced(present: Sequence[LayerPlacement], counts: Sequence[Counts], topology: Topology) -> tuple[LayerPlacement, ...]:
    """Return the placement for these counts, even if the gain is small."""
    return tuple(balanced(*layer, topology) for layer in zip(present, counts, strict=True))


def balanced(present: LayerPlacement, counts: Counts, topology: Topology) -> LayerPlacement:
    """Return the layer's placement for these counts, with ranks assigned to match `present`."""
    if not topology.is_in_nodes(len(counts)):
        return _named(_packed(counts, range(len(counts)), topology.num_ranks, topology.num_slots), present)
    nodes, ranks_per_node = topology.num_nodes, topology.num_ranks // topology.num_nodes
    of_nodes = [
        _packed(counts, experts, ranks_per_node, topology.num_slots // nodes)
        for experts in _experts_of_nodes(counts, nodes, topology.num_groups)
    ]
    whole = [[expert for experts in node for expert in experts] for node in of_nodes]
    ranks = [range(node * ranks_per_node, (node + 1) * ranks_per_node) for node in range(nodes)]
    present_whole = [[expert for rank in some for expert in present[rank]] for some in ranks]
    found: list[tuple[int, ...]] = []
    for node, place in enumerate(_places(whole, present_whole)):
        found += _named(of_nodes[place], [present[rank] for rank in ranks[node]])
    return tuple(found)


def _experts_of_nodes(counts: Counts, num_nodes: int, num_groups: int) -> list[list[int]]:
    """Assign whole groups to nodes, as many to each: the heaviest first, each to the least loaded node with room."""
    size, most = len(counts) // num_groups, num_groups // num_nodes
    weights = [sum(counts[group * size : (group + 1) * size]) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_nodes)]
    loads = [0] * num_nodes
    for group in sorted(range(num_groups), key=lambda group: (-weights[group], group)):
        node = min((node for node in range(num_nodes) if len(groups[node]) < most), key=lambda node: (loads[node], node))
        groups[node].append(group)
        loads[node] += weights[group]
    return [[expert for group in sorted(some) for expert in range(group * size, (group + 1) * size)] for some in groups]


def _replicated(counts: Counts, experts: Sequence[int], num_slots: int, most: int) -> dict[int, int]:
    """Return the number of replicas of each of `experts`, at most `most`."""
    copies = dict.fromkeys(experts, 1)
    for _ in range(num_slots - len(experts)):
        some = (expert for expert in experts if copies[expert] < most)
        copies[min(some, key=lambda expert: (-counts[expert] / copies[expert], copies[expert], expert))] += 1
    return copies


def _packed(counts: Counts, experts: Sequence[int], num_ranks: int, num_slots: int) -> LayerPlacement:
    """Pack the heaviest experts first, all replicas of one at once, each to the least loaded rank with room."""
    copies = _replicated(counts, experts, num_slots, num_ranks)
    room = [num_slots * (rank + 1) // num_ranks - num_slots * rank // num_ranks for rank in range(num_ranks)]
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    loads = [0.0] * num_ranks

    def put(expert: int, rank: int, sign: int = 1) -> None:
        (ranks[rank].add if sign > 0 else ranks[rank].remove)(expert)
        loads[rank] += sign * counts[expert] / copies[expert]
        room[rank] -= sign

    for expert in sorted(experts, key=lambda expert: (-counts[expert] / copies[expert], expert)):
        for _ in range(copies[expert]):
            places = [rank for rank in range(num_ranks) if room[rank] and expert not in ranks[rank]]
            if places:
                put(expert, min(places, key=lambda rank: (loads[rank], -room[rank], rank)))
                continue
            # There is room only where the expert already is. A full rank without it has at least as many experts as that rank,
            # so at least one that is not there: that one moves to the free place, and the expert takes its place.
            free = max(range(num_ranks), key=lambda rank: (room[rank], -loads[rank], -rank))
            full = min((rank for rank in range(num_ranks) if expert not in ranks[rank]), key=lambda rank: (loads[rank], rank))
            moving = min(ranks[full] - ranks[free], key=lambda other: (counts[other] / copies[other], other))
            put(moving, full, -1)
            put(moving, free)
            put(expert, full)
    return sorted_by_rank(ranks)


def _named(packs: LayerPlacement, present: Sequence[Sequence[int]]) -> LayerPlacement:
    return tuple(packs[place] for place in _places(packs, present))


def _places(packs: Sequence[Sequence[int]], present: Sequence[Sequence[int]]) -> list[int]:
    """Return the pack in `packs` for each rank (or node), matching the most similar ones first, so that few experts move."""
    common = [(-len(set(new) & set(old)), rank, place) for rank, old in enumerate(present) for place, new in enumerate(packs)]
    places = [-1] * len(present)
    taken: set[int] = set()
    for _, rank, place in sorted(common):
        if places[rank] < 0 and place not in taken:
            places[rank] = place
            taken.add(place)
    return places


def num_moved(before: Sequence[LayerPlacement], after: Sequence[LayerPlacement]) -> int:
    """Return how many experts are on a rank where they were not before."""
    pairs = [(old, new) for a, b in zip(before, after, strict=True) for old, new in zip(a, b, strict=True)]
    return sum(len(set(new) - set(old)) for old, new in pairs)
