"""How experts that ranks share are asked for and where they lie, as the segment `experts.main` shows it: for `tokamak ctl
experts`, also of a dead engine, and `GET /admin/eplb`. Pure."""

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
    """What was counted of a layer since the engine began, as it is shared out by the placement in force."""

    layer: int
    num_rows: int  # that asked for an expert, once for each that they asked for
    rank_rows: list[float]  # of each rank
    imbalance: float  # max/mean of these
    hottest: list[dict[str, Any]]  # of the experts most asked for: expert, rows, and the ranks where it lies


@dataclass(frozen=True, slots=True)
class ExpertView:
    placement_version: int  # 0: the first one
    num_rebalances: int
    layers: list[LayerView]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def expert_view(table: ExpertTable, num_rebalances: int) -> ExpertView:
    shape = len(table.layers), table.num_experts
    counts = np.frombuffer(table.counts, np.uint64).reshape(table.num_ranks, *shape).sum(axis=0).tolist()
    version, placed = table.committed()
    owners = np.frombuffer(placed, np.int32).reshape(*shape, 1 + table.num_ranks)
    layers = [_layer_view(*layer) for layer in zip(table.layers, counts, owners, strict=True)]
    return ExpertView(version, num_rebalances, layers)


def _layer_view(layer: int, counts: list[int], owners: np.ndarray) -> LayerView:
    placement = placement_of(owners)
    order = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    hottest = [
        {"expert": expert, "rows": counts[expert], "ranks": owners[expert, 1 : 1 + owners[expert, 0]].tolist()}
        for expert in order[:NUM_HOTTEST]
        if counts[expert]
    ]
    return LayerView(layer, sum(counts), loads_of(placement, counts), imbalance(placement, counts), hottest)
