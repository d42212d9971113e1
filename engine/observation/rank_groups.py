"""Figures about ranks that compute together: rank groups, and the experts that they share. Pure; used by `figures.py`."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.observation.snapshot import Snapshot
from engine.process.topology import SCHEDULER, actors_of, readers_of

NUM_HOTTEST = 3


class RankGroupFigures(msgspec.Struct, frozen=True):
    """Ranks that exchange tensors: those of a replica, or all that share experts. Shares are for the window, or since the
    start."""

    ranks: list[str]
    epoch: int  # the newest epoch among its ranks
    num_members: int  # ranks in that epoch
    collective_share: float | None  # share of step time in which ranks waited for each other
    num_steps: int  # of a rank group that shares experts, by its busiest rank
    num_empty_steps: int  # without rows of the rank itself, over all ranks
    empty_share: float | None  # share of the ranks' steps


class ExpertFigures(msgspec.Struct, frozen=True):
    """Experts that ranks share."""

    placement_version: int
    num_rebalances: int
    imbalance: float  # max/mean of the ranks' rows, mean of the layers
    worst_layer: int
    worst_imbalance: float
    hottest: list[dict[str, Any]]  # layer, expert, share of the layer's rows, ranks that have it


def rank_group_figures(now: Snapshot, window: Snapshot | None) -> list[RankGroupFigures]:
    names = [actor.name for actor in now.actors]
    schedulers = actors_of(SCHEDULER, names)
    if now.experts:
        rank_groups = [actors_of("worker", names)]
    else:
        rank_groups = [readers_of(scheduler, names) for scheduler in schedulers]
    return [
        _rank_group(ranks, now, window)
        for ranks in rank_groups
        if any(now.total("rank_group_epoch", actor=rank) for rank in ranks)
    ]


def expert_figures(now: Snapshot) -> ExpertFigures | None:
    if not now.experts:
        return None
    worst = max(now.experts, key=lambda load: load.imbalance)
    hottest = [
        {"layer": load.layer, "expert": hot["expert"], "share": hot["rows"] / load.rows, "ranks": hot["ranks"]}
        for load in now.experts
        for hot in load.hottest[:1]
    ]
    return ExpertFigures(
        placement_version=now.placement_version,
        num_rebalances=int(now.total("eplb_rebalances_total")),
        imbalance=sum(load.imbalance for load in now.experts) / len(now.experts),
        worst_layer=worst.layer,
        worst_imbalance=worst.imbalance,
        hottest=sorted(hottest, key=lambda hot: -hot["share"])[:NUM_HOTTEST],
    )


def _rank_group(ranks: tuple[str, ...], now: Snapshot, window: Snapshot | None) -> RankGroupFigures:
    epochs = {actor.name: int(now.total("rank_group_epoch", actor=actor.name)) for actor in now.actors if actor.name in ranks}
    epoch = max(epochs.values())
    is_alive = {actor.name: actor.is_alive for actor in now.actors}
    return RankGroupFigures(
        ranks=list(ranks),
        epoch=epoch,
        num_members=sum(is_alive[rank] and epochs[rank] == epoch for rank in ranks),
        collective_share=_share("collective_wait_seconds_total", "worker_busy_seconds_total", ranks, now, window),
        num_steps=int(max(now.total("rank_group_steps_total", actor=rank) for rank in ranks)),
        num_empty_steps=int(_sum("empty_rank_group_steps_total", ranks, now)),
        empty_share=_share("empty_rank_group_steps_total", "rank_group_steps_total", ranks, now, window),
    )


def _sum(name: str, ranks: tuple[str, ...], snapshot: Snapshot | None) -> float:
    return sum(snapshot.total(name, actor=rank) for rank in ranks) if snapshot else 0.0


def _share(part: str, whole: str, ranks: tuple[str, ...], now: Snapshot, window: Snapshot | None) -> float | None:
    for earlier in (window, None):
        num_whole = _sum(whole, ranks, now) - _sum(whole, ranks, earlier)
        if num_whole > 0:
            return (_sum(part, ranks, now) - _sum(part, ranks, earlier)) / num_whole
    return None
