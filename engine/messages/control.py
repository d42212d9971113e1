"""Orders of operators, their answers, and what actors tell their supervisor.

client -> supervisor (ZeroMQ) -> actor (control ring)    Command, which carries an Order
actor -> supervisor (ZeroMQ)                             Reply, ActorState, Membership
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

import msgspec

from engine.config import EngineConfig
from engine.messages.sampling import AdapterUse

WeightMode = Literal["abort", "wait", "requeue", "keep"]  # what becomes of open requests when weights change or rest
WEIGHT_MODES: tuple[str, ...] = get_args(WeightMode)
Details = dict[str, int | float | str | list[dict[str, int | float | str | None]] | None]  # of a Reply


class WeightsState(IntEnum):
    """Whether the engine generates and whether its ranks hold weights: the values of the gauge `engine_state`."""

    NORMAL = 0
    PAUSED = 1
    CLEARED = 2
    LOADING = 3


class WeightsRecord(msgspec.Struct, frozen=True):
    """Weights and state that a replica must have, whichever actor dies. Its scheduler writes it, as a whole: before a version
    number is used, and when an order is done, before anybody hears of it. So it always says what was before an order or what is
    after it. The supervisor writes it only while the scheduler is dead, where an order that others did as well is taken
    back."""

    path: str  # of the weights in use; while cleared, of those to come back to
    version: int
    last_version: int  # the highest number that was ever taken in this run
    state: WeightsState  # NORMAL, PAUSED or CLEARED
    ranks: tuple[tuple[str, int], ...]  # path and version that each rank of it holds; while cleared, comes back to
    contents: dict[int, str] = msgspec.field(default_factory=dict)  # of these versions, as the first rank found them

    @staticmethod
    def of_start(config: EngineConfig) -> WeightsRecord:
        """Version 1 is what the engine was started with."""
        return WeightsRecord(config.model, 1, 1, WeightsState.NORMAL, ((config.model, 1),) * config.tensor_parallel_size)


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that the engine serves as the model `name`. `is_leaving`: it takes no requests any more."""

    name: str
    path: str
    number: int  # of its loading: none is used twice in a run
    slot: int  # of the arena
    contents: str  # what tells its numbers from any others', in hexadecimal
    rank: int  # the largest of its linears
    loaded_at: float  # seconds since 1970
    is_leaving: bool = False

    @property
    def use(self) -> AdapterUse:
        """The reference to this adapter that a request carries."""
        return AdapterUse(self.number, self.slot, self.contents)


class AdaptersRecord(msgspec.Struct, frozen=True):
    """The adapters in the arena, whichever actor dies. The supervisor writes it, before anybody hears that an order is done."""

    last_number: int = 0
    adapters: tuple[Adapter, ...] = ()


class ListActors(msgspec.Struct, tag=True, frozen=True):
    pass


class RestartActor(msgspec.Struct, tag=True, frozen=True):
    actor: str
    by: str = ""  # the actor that carries this order: it cannot wait for its own restart, and is answered before that begins


class Pause(msgspec.Struct, tag=True, frozen=True):
    mode: str = "abort"  # one of WEIGHT_MODES, as in the orders below; the scheduler refuses others
    level: str = "pause"  # "pause" | "sleep" (sleep also clears the weights)


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Resume, and wake: after a sleep it loads the weights that were in use."""


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    pass


class ResetEncoderCache(msgspec.Struct, tag=True, frozen=True):
    pass


class ReloadWeights(msgspec.Struct, tag=True, frozen=True):
    path: str = ""  # empty: the ones in use, read anew
    mode: str = "requeue"
    ranks: list[int] = []  # empty: the whole engine
    version: int = 0  # the number that they get; 0: the next one of the replica
    contents: str = ""  # what they must hold, as another replica found them; empty: whatever they do


class ReturnToWeights(msgspec.Struct, tag=True, frozen=True):
    """The supervisor's own: an order is taken back, since another replica failed."""

    record: WeightsRecord


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Serve the adapter in the directory `path` as the model `name`."""

    name: str
    path: str
    replaces: bool = False  # the one of that name, if there is one: its open requests end with it
    slot: int = -1  # set by the supervisor, for the rank that loads it


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Take no more requests for it, and let go of it when those that are open have ended."""

    name: str


class RebalanceExperts(msgspec.Struct, tag=True, frozen=True):
    force: bool = False  # also where next to nothing is to be gained


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    mode: str = "abort"


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


Order = (
    ListActors
    | RestartActor
    | Pause
    | Resume
    | ResetPrefixCache
    | ResetEncoderCache
    | ReloadWeights
    | ReturnToWeights
    | DropWeights
    | LoadAdapter
    | UnloadAdapter
    | RebalanceExperts
    | AbortRequest
    | Shutdown
)


class Command(msgspec.Struct, tag=True):
    """An operator's order on its way: client -> supervisor (ZeroMQ) -> actor (control ring)."""

    command_id: str
    order: Order
    epoch: int = 0  # set by the supervisor: the actor's epoch it is meant for; a successor must not carry it out


class Reply(msgspec.Struct, tag=True):
    """The answer, when it is done on every rank: an HTTP status and, for people, a message."""

    command_id: str
    status: int = 200
    message: str = ""
    details: Details = {}


class ActorState(msgspec.Struct, tag=True):
    """An actor's event to the supervisor: it is READY, or FAILED with a cause, which may be from outside the engine."""

    actor: str
    epoch: int
    state: str
    text: str = ""
    is_from_outside: bool = False


class Membership(msgspec.Struct, tag=True):
    """A rank that shares experts has weights, or none: only with some does it take part in its rank group."""

    actor: str
    epoch: int
    is_member: bool
