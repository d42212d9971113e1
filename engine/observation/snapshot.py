"""The content of an engine's shared memory at one time.

`observer.py` takes snapshots, `figures.py` derives figures from two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.metric_labels import EngineState


class Histogram(msgspec.Struct, frozen=True):
    """Counts per bucket: bucket i covers (bounds[i - 1], bounds[i]], the last one everything above all bounds."""

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.buckets)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return the value below which `share` (0 to 1) of the observations lie, like Prometheus' histogram_quantile: linear
        within a bucket, the highest bound for values above. None without observations."""
        rank = share * self.count
        if not self.count:
            return None
        below, seen = 0.0, 0
        for bound, count in zip(self.bounds, self.buckets, strict=False):
            if count and seen + count >= rank:
                return below + (bound - below) * max(0.0, rank - seen) / count
            below, seen = bound, seen + count
        return self.bounds[-1]

    def since(self, earlier: Histogram) -> Histogram:
        """Return the observations after `earlier`."""
        buckets = tuple(max(0, new - old) for new, old in zip(self.buckets, earlier.buckets, strict=True))
        return Histogram(self.bounds, buckets, max(0.0, self.sum - earlier.sum))


class Row(msgspec.Struct, frozen=True):
    """A metric of one actor, as described in the counters file."""

    name: str
    kind: str  # "counter" | "gauge" | "histogram"
    unit: str
    help: str
    labels: dict[str, str]  # with the actor's name as "actor"
    value: float = 0
    histogram: Histogram | None = None


class Actor(msgspec.Struct, frozen=True):
    name: str
    state: str  # according to its row; a dead process cannot change it
    is_alive: bool  # its process exists
    epoch: int
    pid: int
    restarts: int
    step: int
    heartbeat_age_s: float | None  # None: never written
    cpu_seconds: float | None  # None: no such process
    resident_bytes: int | None


class Ring(msgspec.Struct, frozen=True):
    receiver: str
    sender: str
    capacity_bytes: int
    fill_bytes: int
    num_records: int  # written since the start
    num_full_waits: int


class ErrorEntry(msgspec.Struct, frozen=True):
    """A distinct error of an actor."""

    actor: str
    text: str
    count: int
    first_age_s: float
    last_age_s: float


class ExpertLoad(msgspec.Struct, frozen=True):
    """Distribution of a layer's rows over its shared experts, in the last seconds if known."""

    layer: int
    rows: int
    imbalance: float  # max/mean of the ranks
    hottest: list[dict[str, Any]]  # expert, rows, ranks


class AdapterLoad(msgspec.Struct, frozen=True):
    """A LoRA adapter in service, or being unloaded."""

    name: str
    rank: int  # the largest rank of its linears
    loaded_at: float  # seconds since 1970
    is_leaving: bool  # it takes no more requests
    num_running: int  # running sequences
    num_waiting: int


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine of a router. Numbers are sums over its replicas."""

    address: str
    state: EngineState
    replicas: list[int]  # their places: label `replica` of metrics
    num_running: int  # sequences, also those of other routers and of its own clients
    num_waiting: int
    hit_share: float | None  # of prompt tokens found in its prefix cache; None: it had no prompts
    num_routed: int  # sequences sent there
    num_resubmitted: int  # of them, after the replica was lost
    trouble: str  # why it is gone


class Snapshot(msgspec.Struct, frozen=True):
    """Everything in the shared memory at one time."""

    taken_ns: int  # CLOCK_MONOTONIC
    is_alive: bool  # the supervisor's process exists
    rows: list[Row]
    actors: list[Actor]
    rings: list[Ring]
    errors: list[ErrorEntry]  # the latest first
    placement_version: int = 0  # of shared experts
    experts: list[ExpertLoad] = []  # one per layer; none if ranks share no experts
    adapters: list[AdapterLoad] = []  # in loading order
    engines: list[EngineLoad] = []  # of a router

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter or gauge over all actors (and labels not given)."""
        return sum(row.value for row in self._rows(name) if labels.items() <= row.labels.items())

    def distinct(self, name: str, **labels: str) -> list[float]:
        """Return the different values of a gauge on which its actors should agree; 0 if no actor has it."""
        return sorted({row.value for row in self._rows(name) if labels.items() <= row.labels.items()}) or [0]

    def histogram(self, name: str) -> Histogram | None:
        """Return a histogram summed over its actors; None if no actor has it."""
        parts = [row.histogram for row in self._rows(name) if row.histogram is not None]
        if not parts:
            return None
        buckets = tuple(sum(counts) for counts in zip(*(part.buckets for part in parts), strict=True))
        return Histogram(parts[0].bounds, buckets, sum(part.sum for part in parts))

    def _rows(self, name: str) -> Iterable[Row]:
        return (row for row in self.rows if row.name == name)
