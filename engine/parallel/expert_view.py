"""Rows and places of shared experts, from the segment `experts.main`: for `tokamak ctl experts`, also of a dead engine, and
`GET /admin/eplb`. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engine.parallel.eplb import imbalance, loads_of
from engine.parallel.placement import placement_of
from shm.experts import ExpertTable

NUM_HOTTEST = 4


@dataclass(frozen=True, slots=True)
class LayerView:
    """Counts of a layer, divided according to the current placement."""

    layer: int
    num_rows: int  # counted once for each expert they use
    rank_rows: list[float]  # of each rank
    imbalance: float  # max/mean of these
    hottest: list[dict[str, Any]]  # the busiest experts: expert, rows, and the ranks that have it


@dataclass(frozen=True, slots=True)
class ExpertView:
    """`layers`: since the start. `recent_layers`: in the last `recent_s`, the window of the ranks that balance experts
    (`--eplb-config statistics_interval_s`, and its steps); None: there is no window."""

    placement_version: int  # 0: the first one
    num_rebalances: int
    layers: list[LayerView]
    recent_s: float | None
    recent_layers: list[LayerView] | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def expert_view(table: ExpertTable, num_rebalances: int, now_ns: int) -> ExpertView:
    shape = len(table.layers), table.num_experts
    window = table.recent_since()  # before the counts, which only grow
    counts = np.frombuffer(table.counts, np.uint64).reshape(table.num_ranks, *shape).sum(axis=0)
    version, placed = table.committed()
    owners = np.frombuffer(placed, np.int32).reshape(*shape, 1 + table.num_ranks)

    def views(counts: np.ndarray) -> list[LayerView]:
        return [_layer_view(*layer) for layer in zip(table.layers, counts.tolist(), owners, strict=True)]

    if window is None:
        return ExpertView(version, num_rebalances, views(counts), None, None)
    since_ns, before = window
    recent = counts - np.frombuffer(before, np.uint64).reshape(shape)
    return ExpertView(version, num_rebalances, views(counts), (now_ns - since_ns) / 1e9, views(recent))


def _layer_view(layer: int, counts: list[int], owners: np.ndarray) -> LayerView:
    placement = placement_of(owners)
    order = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    hottest = [
        {"expert": expert, "rows": counts[expert], "ranks": owners[expert, 1 : 1 + owners[expert, 0]].tolist()}
        for expert in order[:NUM_HOTTEST]
        if counts[expert]
    ]
    return LayerView(layer, sum(counts), loads_of(placement, counts), imbalance(placement, counts), hottest)
