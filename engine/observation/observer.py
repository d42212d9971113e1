"""Takes snapshots of an engine from outside: its counters, its rings, its adapters, and its processes in /proc.

Used by `tokamak top` and the dashboard. Everything is mapped read-only without involving the processes, so it works on an
engine that runs, hangs or is dead. Mappings stay readable after the run is removed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from engine.errors import TokamakError
from engine.observation.snapshot import Actor, AdapterLoad, EngineLoad, ErrorEntry, ExpertLoad, Histogram, Ring, Row, Snapshot
from engine.process.run_directory import Run
from engine.process.topology import index_of, places_of
from shm.counters import ActorSnapshot, Counters, ErrorSnapshot
from shm.experts import ExpertTable
from shm.inspection import rings
from shm.process import ProcessIdentity, boot_id

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Observer:
    """A look at one run. Raises SharedMemoryError if its counters are gone or not ours. `shares_experts`: read the placement of
    experts, too. `has_adapters`: read the supervisor's record of adapters, too."""

    def __init__(self, run: Run, *, shares_experts: bool = False, has_adapters: bool = False) -> None:
        self._run = run
        self._counters = Counters.attach_readonly(run.run_id)
        self._experts = ExpertTable.attach(run.run_id, is_readonly=True) if shares_experts else None
        self._has_adapters = has_adapters

    def snapshot(self) -> Snapshot:
        now_ns = time.monotonic_ns()
        read = self._counters.snapshot()
        actors = self._counters.actors()
        places = places_of(actor.name for actor in actors)
        placement_version, experts = _expert_loads(self._experts, now_ns) if self._experts else (0, [])
        return Snapshot(
            taken_ns=now_ns,
            is_alive=self._counters.segment.owner.is_alive(),
            rows=[_row(metric) for metric in read["metrics"]],
            actors=[_actor(actor, now_ns) for actor in actors if actor.name not in places],
            rings=[
                Ring(ring.receiver, ring.sender, ring.capacity_bytes, ring.fill_bytes, ring.num_records, ring.num_full_waits)
                for ring in rings(self._run.run_id)
            ],
            errors=[_error(error, time.time_ns()) for error in self._counters.errors.entries()],
            placement_version=placement_version,
            experts=experts,
            adapters=_adapters(self._run, read["metrics"]) if self._has_adapters else [],
            engines=_engines(self._run, read["metrics"]) if places else [],
        )

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        self._counters.close()


def _expert_loads(table: ExpertTable, now_ns: int) -> tuple[int, list[ExpertLoad]]:
    """Return the version of the placement, and the load of each layer: in the ranks' window, if there is one and the layer had
    rows."""
    from engine.parallel.expert_view import expert_view  # numpy

    view = expert_view(table, 0, now_ns)
    recent = view.recent_layers or []
    layers = recent if any(layer.num_rows for layer in recent) else view.layers
    return view.placement_version, [ExpertLoad(layer.layer, layer.num_rows, layer.imbalance, layer.hottest) for layer in layers]


def _adapters(run: Run, metrics: list[dict[str, Any]]) -> list[AdapterLoad]:
    """Return the adapters; none if the run directory is gone."""
    try:
        adapters = run.adapters().adapters
    except TokamakError:
        return []

    def num_sequences(what: str, slot: int) -> int:
        name, own = f"adapter_requests_{what}", str(slot)
        return sum(int(row["value"]) for row in metrics if row["name"] == name and row["labels"]["adapter_slot"] == own)

    return [
        AdapterLoad(
            each.name,
            each.rank,
            each.loaded_at,
            each.is_leaving,
            num_sequences("running", each.slot),
            num_sequences("waiting", each.slot),
        )
        for each in adapters
    ]


def _engines(run: Run, metrics: list[dict[str, Any]]) -> list[EngineLoad]:
    """Return the engines of a router."""

    def of(replicas: tuple[int, ...], name: str, label: str) -> int:
        return sum(int(row["value"]) for row in metrics if row["name"] == name and index_of(row["labels"][label]) in replicas)

    found = []
    for each in run.engines():
        num_queries = of(each.places, "prefix_cache_queries_total", "actor")
        num_hits = of(each.places, "prefix_cache_hits_total", "actor")
        found.append(
            EngineLoad(
                each.address,
                each.state,
                list(each.places),
                of(each.places, "num_requests_running", "actor"),
                of(each.places, "num_requests_waiting", "actor"),
                num_hits / num_queries if num_queries else None,
                of(each.places, "requests_routed_total", "replica"),
                of(each.places, "replica_resubmissions_total", "replica"),
                each.trouble,
            )
        )
    return found


def _row(metric: dict[str, Any]) -> Row:
    described = {key: metric[key] for key in ("name", "kind", "unit", "help", "labels")}
    if metric["kind"] == "histogram":
        return Row(**described, histogram=Histogram(tuple(metric["bounds"]), tuple(metric["buckets"]), metric["sum"]))
    return Row(**described, value=metric["value"])


def _actor(actor: ActorSnapshot, now_ns: int) -> Actor:
    is_alive = actor.pid > 0 and ProcessIdentity(actor.pid, actor.start_ticks, boot_id()).is_alive()
    cpu_seconds, resident_bytes = _usage(actor.pid) if is_alive else (None, None)
    return Actor(
        name=actor.name,
        state=actor.state.name,
        is_alive=is_alive,
        epoch=actor.epoch,
        pid=actor.pid,
        restarts=actor.restarts,
        step=actor.step,
        heartbeat_age_s=max(0, now_ns - actor.heartbeat_ns) / 1e9 if actor.heartbeat_ns else None,
        cpu_seconds=cpu_seconds,
        resident_bytes=resident_bytes,
    )


def _usage(pid: int) -> tuple[float | None, int | None]:
    """Return CPU seconds and resident bytes: fields 14, 15 and 24 of /proc/<pid>/stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None, None  # it has ended
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND, int(fields[21]) * _PAGE_BYTES


def _error(error: ErrorSnapshot, now_ns: int) -> ErrorEntry:
    ages = ((now_ns - at_ns) / 1e9 for at_ns in (error.first_ns, error.last_ns))
    return ErrorEntry(error.actor, error.text, error.count, *ages)
