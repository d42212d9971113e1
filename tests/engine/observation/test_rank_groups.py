"""Rank groups and shared experts in the derived metrics and on the screen of `tokamak top`."""

from __future__ import annotations

import msgspec
import pytest

from engine.observation.figures import figures
from engine.observation.snapshot import Actor, ExpertLoad, Snapshot
from tests.tools.engines import busy, counter, snapshot
from tests.tools.top.test_screen import screen

HOT = {"expert": 5, "rows": 300, "ranks": [1]}
LOADS = [
    ExpertLoad(3, 1000, 1.2, [{"expert": 7, "rows": 100, "ranks": [0, 1]}, HOT]),
    ExpertLoad(4, 1000, 1.8, [HOT]),
    ExpertLoad(5, 0, 1.0, []),
]


def rank_group_snapshot(
    taken_s: float, num_replicas: int = 2, tensor_ranks: int = 1, *, shares_experts: bool = True
) -> Snapshot:
    """Return a snapshot with 10 steps of the rank group a second, a fifth of the step time spent waiting; worker1 has rows in
    none. The last rank is an epoch behind."""
    base = snapshot(taken_s)
    like = base.actors[-1]
    num_ranks = num_replicas * tensor_ranks
    names = [f"scheduler{index}" if num_replicas > 1 else "scheduler" for index in range(num_replicas)]
    names += [f"cache{index}" if num_replicas > 1 else "cache" for index in range(num_replicas)]
    names += [f"worker{rank}" for rank in range(num_ranks)]
    actors: list[Actor] = [*base.actors[:3], *(msgspec.structs.replace(like, name=name) for name in names)]
    rows = [counter("eplb_rebalances_total", "worker0", 3)]
    for rank in range(num_ranks):
        name = f"worker{rank}"
        rows += [
            counter("rank_group_epoch", name, 7 - (rank == num_ranks - 1)),
            counter("collective_wait_seconds_total", name, 0.1 * taken_s),
            counter("worker_busy_seconds_total", name, 0.5 * taken_s),
            counter("rank_group_steps_total", name, 10 * taken_s if shares_experts else 0),
            counter("empty_rank_group_steps_total", name, 10 * taken_s if shares_experts and rank == 1 else 0),
        ]
    experts = LOADS if shares_experts else []
    return msgspec.structs.replace(base, actors=actors, rows=rows, experts=experts, placement_version=3)


def test_ranks_that_share_experts_are_one_rank_group() -> None:
    (rank_group,) = figures(rank_group_snapshot(8.0), window=rank_group_snapshot(3.0)).rank_groups
    assert (rank_group.ranks, rank_group.epoch, rank_group.num_members) == (["worker0", "worker1"], 7, 1)
    assert (rank_group.collective_share, rank_group.empty_share) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (rank_group.num_steps, rank_group.num_empty_steps) == (80, 80)


def test_ranks_of_a_replica_are_one() -> None:
    rank_groups = figures(rank_group_snapshot(8.0, 2, 2, shares_experts=False)).rank_groups
    assert [rank_group.ranks for rank_group in rank_groups] == [["worker0", "worker1"], ["worker2", "worker3"]]
    assert [rank_group.num_members for rank_group in rank_groups] == [2, 1]
    assert [rank_group.empty_share for rank_group in rank_groups] == [None, None]
    assert figures(busy(8.0)).rank_groups == []


def test_experts() -> None:
    experts = figures(rank_group_snapshot(8.0)).experts
    assert experts is not None
    assert (experts.placement_version, experts.num_rebalances) == (3, 3)
    assert experts.imbalance == pytest.approx(4 / 3)
    assert (experts.worst_layer, experts.worst_imbalance) == (4, 1.8)
    shares = [(hot["layer"], hot["expert"], hot["share"], hot["ranks"]) for hot in experts.hottest]
    assert shares == [(4, 5, 0.3, [1]), (3, 7, 0.1, [0, 1])]
    assert figures(busy(8.0)).experts is None


@pytest.mark.parametrize("height", [24, 50, None])
def test_the_screen_has_a_line_for_each(height: int | None) -> None:
    lines = screen(rank_group_snapshot(8.0), 120, height)
    assert height is None or len(lines) <= height
    text = "\n".join(lines)
    for wanted in ("1 of 2 ranks in epoch 7", "23% of steps in collectives", "80 group steps", "50% empty"):
        assert wanted in text
    for wanted in ("1.33 max/mean", "1.80 in layer 4", "3 rebalances", "4/5 30% on 1", "3/7 10% on 0+1"):
        assert wanted in text


@pytest.mark.slow
@pytest.mark.parametrize("height", [24, 30, 40])
def test_many_ranks_and_rank_groups_fold(height: int) -> None:
    lines = screen(rank_group_snapshot(8.0, 32, 2, shares_experts=False), 80, height)
    text = "\n".join(lines)
    assert len(lines) <= height
    assert "more actors" in text
    assert "group worker4" in text
    assert "and 29 more rank groups" in text
