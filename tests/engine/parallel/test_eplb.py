"""Balancing of experts: properties that hold for any counts, and actual balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.eplb import Topology, balanced, forced, imbalance, loads_of, num_moved, rebalanced
from engine.parallel.placement import FIRST_PLACEMENTS, LayerPlacement, linear, max_redundant_experts
from tests.engine.parallel.test_placement import check_placement

MIN_GAIN = 0.05


@st.composite
def topologies(draw: st.DrawFn) -> tuple[int, Topology]:
    """Draw experts and their topology, with nodes and groups that divide and that do not."""
    num_nodes, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    num_ranks = draw(st.integers(1, 3)) * num_nodes if draw(st.booleans()) else draw(st.integers(1, 7))
    num_experts = num_groups * draw(st.integers(1, 5))
    num_slots = num_experts + draw(st.integers(0, max_redundant_experts(num_experts, num_ranks)))
    return num_experts, Topology(num_ranks, num_slots, num_nodes, num_groups)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Topology, LayerPlacement, list[int]]:
    num_experts, topology = draw(topologies())
    counts = draw(st.lists(st.integers(0, 1000) | st.just(0), min_size=num_experts, max_size=num_experts))
    first = FIRST_PLACEMENTS[draw(st.sampled_from(sorted(FIRST_PLACEMENTS)))](
        num_experts, topology.num_ranks, topology.num_slots
    )
    other = draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    return topology, balanced(first, other, topology), counts


@given(layer=layers())
def test_any_counts(layer: tuple[Topology, LayerPlacement, list[int]]) -> None:
    """Every expert is placed, capacity is kept, the result is a function of the arguments and never worse than the present
    placement."""
    topology, present, counts = layer
    found = balanced(present, counts, topology)
    check_placement(found, len(counts), topology.num_ranks, topology.num_slots)
    assert balanced(present, tuple(counts), topology) == found
    assert num_moved([found], [balanced(found, counts, topology)]) == 0
    proposed = rebalanced([present], [counts], topology, MIN_GAIN)
    if proposed is None:
        assert imbalance(found, counts) > imbalance(present, counts) - MIN_GAIN or found == present
    else:
        assert proposed == (found,)
        assert imbalance(found, counts) <= imbalance(present, counts) - MIN_GAIN


@given(layer=layers())
def test_replicas_stay_within_nodes(layer: tuple[Topology, LayerPlacement, list[int]]) -> None:
    topology, present, counts = layer
    if not topology.is_in_nodes(len(counts)):
        return
    size, ranks_per_node = len(counts) // topology.num_groups, topology.num_ranks // topology.num_nodes
    nodes_of: dict[int, set[int]] = {}
    for rank, experts in enumerate(balanced(present, counts, topology)):
        for expert in experts:
            nodes_of.setdefault(expert // size, set()).add(rank // ranks_per_node)
    assert all(len(nodes) == 1 for nodes in nodes_of.values())


def test_a_hot_expert_gets_the_replicas() -> None:
    """Three more slots compensate for it."""
    counts, present = [50, 50, 50, 50, 900, 100, 0, 0], linear(8, 2, 11)
    assert imbalance(present, counts) > 1.3
    (found,) = rebalanced([present], [counts], Topology(2, 11), MIN_GAIN) or ()
    assert all(4 in experts for experts in found)
    assert imbalance(found, counts) < 1.05
    assert sum(loads_of(found, counts)) == sum(counts)


def test_a_skewed_layer_without_replicas() -> None:
    """Half of the experts have all the rows, and are on one rank."""
    counts, present = [100] * 4 + [0] * 4, linear(8, 2, 8)
    (found,) = rebalanced([present], [counts], Topology(2, 8), MIN_GAIN) or ()
    assert (imbalance(present, counts), imbalance(found, counts)) == (2.0, 1.0)
    assert num_moved([present], [found]) == 4


def test_small_gain_moves_nothing() -> None:
    """Layers that gain too little stay, whatever other layers do."""
    present, even, skewed = linear(4, 2, 4), [51, 50, 50, 49], [10, 10, 0, 0]
    assert rebalanced([present], [even], Topology(2, 4), MIN_GAIN) is None
    assert rebalanced([present], [[0] * 4], Topology(2, 4), 0.0) is None
    assert forced([present], [even], Topology(2, 4)) != (present,)
    found = rebalanced([present, present], [even, skewed], Topology(2, 4), MIN_GAIN)
    assert found is not None
    assert found[0] == present
    assert found[1] != present


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_keep_their_experts(num_nodes: int) -> None:
    """The same packs on other ranks are no move."""
    topology = Topology(4, 8, num_nodes, 4)
    counts = [8, 7, 6, 5, 4, 3, 2, 1]
    found = balanced(linear(8, 4, 8), counts, topology)
    turned = tuple(reversed(found))
    assert balanced(turned, counts, topology) == turned
