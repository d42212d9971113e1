"""Rank groups as shown by the counters file, for `tokamak ctl rank-groups` (also of a dead engine) and `GET
/admin/rank-groups`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from engine.process.topology import index_of, role_of

FIGURES = ("rank_group_epoch", "collectives_total", "collective_wait_seconds_total")


def rank_group_ranks(
    states: Mapping[str, str], values: Mapping[tuple[str, str], float], tensor_parallel_size: int
) -> list[dict[str, str | int | float]]:
    """Return one entry per rank, from the actors' `states`; `values`: by actor and metric."""
    ranks = []
    for name, state in states.items():
        if role_of(name) == "worker":
            replica, rank = divmod(index_of(name), tensor_parallel_size)
            entry: dict[str, str | int | float] = {"actor": name, "replica": replica, "rank": rank, "state": state}
            ranks.append(entry | {figure: values[name, figure] for figure in FIGURES})
    return ranks
