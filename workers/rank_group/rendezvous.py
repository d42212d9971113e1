"""Ports at which the process groups of a rank's reference ops meet. Made by the runner, used by the device; imports no
Paddle."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from workers.rank_group.communicator import Communicator
from workers.rank_group.store import open_store


class Meeting(msgspec.Struct, frozen=True):
    """A group of ranks, and the port of its store; keys contain the name of this life of the rank group."""

    communicator: Communicator
    port: int
    life: str


class Rendezvous(msgspec.Struct, frozen=True):
    """Meetings with the ranks that share this one's matrices, and with all that share experts; None: no such ranks."""

    tensor: Meeting | None = None
    experts: Meeting | None = None

    @staticmethod
    def of(
        config: EngineConfig, rank: int, tensor: Communicator | None, experts: Communicator | None, epoch: int = 1
    ) -> Rendezvous | None:
        """Return the rendezvous of rank `rank` of the engine; None if it needs no process groups. `epoch`: of its process,
        equal on all ranks, because they start and end together."""
        if config.ops in ("native", "cuda") or (tensor is None and experts is None):
            return None
        ports = config.group_ports
        return Rendezvous(
            Meeting(tensor, ports[rank // config.tensor_parallel_size], f"tensor.{epoch}") if tensor else None,
            Meeting(experts, ports[-1], f"experts.{epoch}") if experts else None,
        )

    def open_stores(self) -> None:
        """Open the stores of the groups in which this rank is the first."""
        for meeting in (self.tensor, self.experts):
            if meeting is not None and meeting.communicator.place == 0:
                open_store(meeting.port)
