"""Operators' commands, the replies, and messages from actors to their supervisor.

client -> supervisor (ZeroMQ) -> actor (control ring)    Command, which carries an Order
actor -> supervisor (ZeroMQ)                             Reply, ActorState, Membership
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

import msgspec

from engine.config import EngineConfig
from engine.messages.sampling import AdapterUse
from engine.metric_labels import EngineState

# what happens to open requests when weights change or the engine sleeps
WeightMode = Literal["abort", "wait", "requeue", "keep"]
WEIGHT_MODES: tuple[str, ...] = get_args(WeightMode)
Details = dict[str, int | float | str | list[dict[str, int | float | str | None]] | None]  # of a Reply


class WeightsState(IntEnum):
    """Whether the engine generates and whether its ranks hold weights: the values of the gauge `engine_state`."""

    NORMAL = 0
    PAUSED = 1
    CLEARED = 2
    LOADING = 3


class WeightsRecord(msgspec.Struct, frozen=True):
    """Weights and state of a replica, which must survive every actor. Its scheduler writes the whole record before a version
    number is used, and when a command is done, before the reply is sent. So the record always describes the state before or
    after a command, never between. The supervisor writes it only while the scheduler is dead, to roll back a command that other
    replicas carried out."""

    path: str  # of the weights in use; while cleared, of those to return to
    version: int
    last_version: int  # the highest number ever used in this run
    state: WeightsState  # NORMAL, PAUSED or CLEARED
    ranks: tuple[tuple[str, int], ...]  # path and version that each of its ranks holds; while cleared, returns to
    contents: dict[int, str] = msgspec.field(default_factory=dict)  # of these versions, as the first rank found them

    @staticmethod
    def of_start(config: EngineConfig) -> WeightsRecord:
        """Return the record of version 1: the weights that the engine was started with."""
        return WeightsRecord(config.model, 1, 1, WeightsState.NORMAL, ((config.model, 1),) * config.tensor_parallel_size)


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that the engine serves as the model `name`. `is_leaving`: it takes no more requests."""

    name: str
    path: str
    number: int  # unique for each load within a run
    slot: int  # of the arena
    contents: str  # fingerprint of its weights, hexadecimal
    rank: int  # the largest rank of its linears
    loaded_at: float  # seconds since 1970
    is_leaving: bool = False

    @property
    def use(self) -> AdapterUse:
        """The reference to this adapter that a request carries."""
        return AdapterUse(self.number, self.slot, self.contents)


class AdaptersRecord(msgspec.Struct, frozen=True):
    """The adapters in the arena, which must survive every actor. The supervisor writes it before a command is answered."""

    last_number: int = 0
    adapters: tuple[Adapter, ...] = ()


class EngineRecord(msgspec.Struct, frozen=True):
    """An engine of a router, as its link sees it."""

    address: str
    state: EngineState
    places: tuple[int, ...] = ()  # of its replicas: `scheduler<k>` in the router's tables
    trouble: str = ""  # why it has no session


class ListActors(msgspec.Struct, tag=True, frozen=True):
    pass


class RestartActor(msgspec.Struct, tag=True, frozen=True):
    actor: str
    # the actor that carries this command: it cannot wait for its own restart, so it is answered before that begins
    by: str = ""


class Pause(msgspec.Struct, tag=True, frozen=True):
    mode: str = "abort"  # one of WEIGHT_MODES, as in the commands below; the scheduler refuses others
    level: str = "pause"  # "pause" | "sleep" (sleep also clears the weights)


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Resume or wake: after a sleep it loads the weights that were in use."""


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    pass


class ResetEncoderCache(msgspec.Struct, tag=True, frozen=True):
    pass


class ReloadWeights(msgspec.Struct, tag=True, frozen=True):
    path: str = ""  # empty: the weights in use, read again
    mode: str = "requeue"
    ranks: list[int] = []  # empty: the whole engine
    version: int = 0  # the version number they get; 0: the next one of the replica
    contents: str = ""  # what they must contain, as another replica found them; empty: not checked


class ReturnToWeights(msgspec.Struct, tag=True, frozen=True):
    """Roll a command back, because another replica failed. Sent by the supervisor only."""

    record: WeightsRecord


class Undo(msgspec.Struct, tag=True, frozen=True):
    """Return to weights and state from before the command `command_id`, which must be the last one that changed them."""

    command_id: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Serve the adapter in the directory `path` as the model `name`."""

    name: str
    path: str
    replaces: bool = False  # replaces an adapter with this name, whose open requests end with it
    slot: int = -1  # set by the supervisor, for the rank that loads it
    other_free_slots: tuple[int, ...] = ()  # likewise; their memory may still be that of former adapters


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Take no more requests for the adapter, and unload it when the open ones have ended."""

    name: str


class RebalanceExperts(msgspec.Struct, tag=True, frozen=True):
    force: bool = False  # also if the gain is negligible


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
    | Undo
    | DropWeights
    | LoadAdapter
    | UnloadAdapter
    | RebalanceExperts
    | AbortRequest
    | Shutdown
)


# what a router may ask its engines for
RouterOrder = (
    Pause
    | Resume
    | ResetPrefixCache
    | ResetEncoderCache
    | ReloadWeights
    | DropWeights
    | Undo
    | LoadAdapter
    | UnloadAdapter
    | RebalanceExperts
    | AbortRequest
)


class Command(msgspec.Struct, tag=True):
    """An operator's command on its way: client -> supervisor (ZeroMQ) -> actor (control ring)."""

    command_id: str
    order: Order
    epoch: int = 0  # set by the supervisor: the epoch of the actor that it is meant for; a later life must not carry it out


class Reply(msgspec.Struct, tag=True):
    """The answer, sent when the command is done on every rank: an HTTP status and, for people, a message."""

    command_id: str
    status: int = 200
    message: str = ""
    details: Details = {}


class ActorState(msgspec.Struct, tag=True):
    """An actor's event to the supervisor: READY, or FAILED with a cause, which may lie outside the engine or be a user's
    mistake (an option, a damaged checkpoint)."""

    actor: str
    epoch: int
    state: str
    text: str = ""
    is_from_outside: bool = False
    is_mistake: bool = False


class Membership(msgspec.Struct, tag=True):
    """Whether a rank that shares experts has weights; only ranks with weights take part in the rank group."""

    actor: str
    epoch: int
    is_member: bool
