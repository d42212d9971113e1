"""Load of a replica, as the link of its engine reports it to routers."""

from __future__ import annotations

from engine.cluster.frames import Load
from engine.messages import WeightsState
from engine.metric_labels import REPLICA_GAUGES
from engine.process.context import ActorContext
from engine.process.topology import readers_of


class ReplicaGauges:
    """Gauges of a replica."""

    def __init__(self, context: ActorContext, scheduler: str) -> None:
        self._context = context
        self._scheduler = scheduler
        self._actors = (scheduler, *readers_of(scheduler, (context.name, *context.peers())))
        self.version = context.counters.counter("engine_weight_version", scheduler)
        self._cells = {name: context.counters.counter(name, scheduler) for name in REPLICA_GAUGES}

    def load(self) -> Load:
        values = {name: int(cell.value) for name, cell in self._cells.items()}
        is_serving = values["engine_state"] == WeightsState.NORMAL  # a paused one would hold new requests
        is_ready = is_serving and all(map(self._context.is_peer_ready, self._actors))
        return Load(is_ready, self._context.peer_epoch(self._scheduler), **values)
