"""A place of a router: the row of a replica of an engine in the router's tables, as schedulers have it on one machine."""

from __future__ import annotations

import time

from engine.cluster.frames import Load
from engine.messages import WeightsState
from engine.metric_labels import REPLICA_GAUGES, RESUBMISSION_CAUSES
from engine.process.context import ActorContext
from engine.process.topology import CACHE, names_of
from shm.counters import State
from shm.fingerprints import KIND, FingerprintWriter
from shm.segment import Segment, segment_name


class Place:
    """The place `index`, written by the link."""

    def __init__(self, context: ActorContext, index: int) -> None:
        name = context.schedulers[index]
        cache = names_of(CACHE, len(context.schedulers))[index]
        self.index = index
        self.name = name
        self.prefixes = FingerprintWriter(Segment.attach(segment_name(context.run.run_id, KIND, cache)))
        self.holder = ""  # address of the engine that has it, or had it last
        self.is_stranded = False  # it dropped requests, or lost those that it had, and the api does not know yet
        self._cause = context.counters.counter("loss_cause", name)
        self.epoch = 0  # of the engine's scheduler
        self.weight_version = 0  # by the router's numbers
        self._row = context.counters.actor(name)
        self._cells = {gauge: context.counters.counter(gauge, name) for gauge in REPLICA_GAUGES}
        self._version = context.counters.counter("engine_weight_version", name)

    @property
    def is_ready(self) -> bool:
        return self._row.state is State.READY

    def show(self, load: Load, num_sent: int, *, is_ready: bool) -> None:
        """Show the load of the replica; `num_sent`: sequences that are not in it yet."""
        for gauge, cell in self._cells.items():
            cell.set(getattr(load, gauge))
        self._cells["num_requests_waiting"].set(load.num_requests_waiting + num_sent)
        self._cells["num_free_slots"].set(load.num_free_slots - num_sent)
        self._version.set(0 if load.engine_state == WeightsState.CLEARED else self.weight_version)
        self._row.beat(time.monotonic_ns())
        self._row.set_state(State.READY if is_ready else State.LOADING)

    def quiet(self) -> None:
        """Take no new requests."""
        self._row.set_state(State.LOADING)

    def strand(self, cause: str) -> None:
        """Note that sequences were lost here; the first cause counts."""
        if not self.is_stranded:
            self.is_stranded = True
            self._cause.set(RESUBMISSION_CAUSES.index(cause))

    def lose(self, cause: str, *, has_open: bool = True) -> None:
        """Forget the replica: its engine is gone, or begins anew. If it had open sequences, they are stranded."""
        self._row.set_state(State.DEAD if self._row.epoch else State.SPAWNED)
        if has_open and self._row.epoch:
            self.strand(cause)
        self.prefixes.clear()
        for cell in (*self._cells.values(), self._version):
            cell.set(0)

    def take(self, weight_version: int) -> None:
        """Stand for a replica of an engine whose session begins."""
        self.epoch = 0
        self.weight_version = weight_version
        if not self._row.epoch:
            self._row.advance_epoch()

    def rescue(self) -> None:
        """Begin the next epoch, so that the api submits again what was here."""
        self.is_stranded = False
        self._row.advance_epoch()
