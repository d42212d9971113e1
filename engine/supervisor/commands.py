"""Operators' commands in the supervisor: it carries some out itself, and forwards the others to control rings of actors.

    ListActors, RestartActor, Shutdown     answered here
    LoadAdapter, UnloadAdapter             a Command on the control ring of the first rank (`adapters.py`)
    RebalanceExperts                       a Command on the control ring of the rank that leads (`rebalances.py`)
    everything else                        a Command on each scheduler's control ring; the Reply returns as an event
                                           (`replica_commands.py`). In a router on the link's, which asks the engines

Every command is answered once: when it is done, or with 503 if the actor that should carry it out died meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import (
    Command,
    ListActors,
    LoadAdapter,
    RebalanceExperts,
    Reply,
    RestartActor,
    Shutdown,
    Undo,
    UnloadAdapter,
    encode,
)
from engine.process.control_client import check_length
from engine.process.run_directory import Run
from engine.process.segments import RunSegments
from engine.process.topology import LINK, SCHEDULER, SUPERVISOR, ActorPlan, actors_of
from engine.supervisor.adapters import AdapterCommands
from engine.supervisor.child_process import Child
from engine.supervisor.rebalances import Rebalances
from engine.supervisor.replica_commands import ReplicaCommands, changes_weights, spoken
from shm.counters import ActorSnapshot
from shm.mailbox import MailboxSender

if TYPE_CHECKING:
    from engine.process.control import ControlServer

_SUPERVISOR_EPOCH = 1
_NOT_SERVING = "the engine is starting or stopping; try again when it is ready"


class Engine(Protocol):
    """The supervisor's side of its children, as commands need it."""

    config: EngineConfig
    plan: tuple[ActorPlan, ...]
    segments: RunSegments
    children: dict[str, Child]

    @property
    def run(self) -> Run:
        """The run and its files."""

    @property
    def is_serving(self) -> bool:
        """Whether every child has been ready, and the engine is not stopping."""

    def stop(self, reason: str) -> None:
        """Stop the engine in order."""

    def restart(self, name: str) -> None:
        """End `name` so that it is restarted."""


class SupervisorCommands:
    """Carries out or forwards the commands for one engine."""

    def __init__(self, engine: Engine, server: ControlServer) -> None:
        self._engine = engine
        self._server = server
        self._senders: dict[str, MailboxSender] = {}  # to schedulers and ranks
        self._carriers = (LINK,) if engine.config.is_router else actors_of(SCHEDULER, (plan.name for plan in engine.plan))
        self._replicas = ReplicaCommands(engine.run, self._carriers, self._tell, server.reply)
        self._rebalances = Rebalances(self._tell, server.reply)
        names = [plan.name for plan in engine.plan]
        self.adapters = AdapterCommands(engine.run, engine.config, engine.segments.counters, names, self._tell, server.reply)
        self._restarting: dict[str, list[str]] = {}  # actor -> ids of commands that wait until it is ready again

    def handle(self, command: Command) -> None:
        """Carry out or forward a command."""
        try:
            check_length(command, encode(command))
        except RequestError as error:
            self._refuse(command, error.status, error.message)
            return
        match command.order:
            case ListActors():
                self._list(command)
            case RestartActor(actor, by):
                self._restart(command, actor, by)
            case Shutdown():
                self._server.reply(Reply(command.command_id, 200, "the engine stops"))
                self._engine.stop("asked to stop by an operator")
            case LoadAdapter() | UnloadAdapter():
                self._adapt(command)
            case RebalanceExperts():
                self._rebalance(command)
            case Undo(command_id) if self.adapters.has_loaded(command_id):
                self.adapters.undo(command, command_id)
            case _:
                self._forward(command)

    def answer(self, reply: Reply) -> None:
        """Handle an actor's reply to a forwarded command."""
        if not self._rebalances.take(reply) and not self.adapters.take(reply):
            self._replicas.take(reply)

    def actor_ready(self, name: str) -> None:
        """Answer the command that restarted `name`."""
        for command_id in self._restarting.pop(name, []):
            epoch = self._engine.children[name].epoch
            self._server.reply(Reply(command_id, 200, f"{name} is ready with epoch {epoch}", {"epoch": epoch}))
        self._replicas.scheduler_ready(name)

    def actor_died(self, name: str, cause: str) -> None:
        """Fail a dead scheduler's commands: its next life does not carry them out."""
        if name in self._carriers:
            self._replicas.scheduler_died(name, cause)
        self._rebalances.actor_died(name, cause)
        self.adapters.actor_died(name, cause)

    def refuse_open(self, cause: str) -> None:
        """Answer the open commands with 503: the engine is stopping."""
        waiting = [command_id for command_ids in self._restarting.values() for command_id in command_ids]
        for command_id in waiting:
            self._server.reply(Reply(command_id, 503, f"the engine is stopping: {cause}"))
        self._restarting.clear()
        self._rebalances.refuse_open(cause)
        self.adapters.refuse_open(cause)
        self._replicas.refuse_open(cause)

    def _list(self, command: Command) -> None:
        now_ns = time.monotonic_ns()
        actors = self._engine.segments.counters.actors()
        rows = [_row(actor, now_ns) for actor in actors if actor.epoch]  # the others are places without an engine
        self._server.reply(Reply(command.command_id, 200, "", {"actors": rows}))

    def _restart(self, command: Command, name: str, by: str) -> None:
        names = [plan.name for plan in self._engine.plan]
        if name == SUPERVISOR:
            self._refuse(command, 400, "the supervisor cannot be restarted; stop the engine and start it again")
        elif name not in names:
            self._refuse(command, 404, f"actor {name!r} does not exist; actors are {', '.join(names)}")
        elif not self._engine.is_serving:
            self._refuse(command, 503, _NOT_SERVING)
        elif name == by:
            self._server.reply(Reply(command.command_id, 202, f"{name} sends this reply and restarts now"))
            self._engine.restart(name)
        else:
            self._restarting.setdefault(name, []).append(command.command_id)
            self._engine.restart(name)

    def _adapt(self, command: Command) -> None:
        if self._engine.is_serving:
            self.adapters.begin(command)
        else:
            self._refuse(command, 503, _NOT_SERVING)

    def _rebalance(self, command: Command) -> None:
        config = self._engine.config
        if config.is_router:
            self._forward(command)
        elif not config.enable_eplb:
            self._refuse(command, 409, "expert rebalancing is disabled; start the engine with --enable-eplb")
        elif not self._engine.is_serving:
            self._refuse(command, 503, _NOT_SERVING)
        elif (trouble := self._replicas.why_no_weights()) is not None:
            self._refuse(command, trouble.status, trouble.message)
        else:
            self._rebalances.begin(command, self._engine.segments.rank_groups[0].members, config.num_ranks)

    def _forward(self, command: Command) -> None:
        if self._rebalances.is_under_way and changes_weights(command.order):
            self._refuse(command, 409, "a rebalancing is in progress; try again when it has finished")
            return
        trouble = "" if self._engine.is_serving else _NOT_SERVING
        for carrier in self._carriers:
            trouble = trouble or self._why_not_ready(carrier)
        if trouble:
            self._refuse(command, 503, trouble)
            return
        try:
            config = self._engine.config
            self._replicas.begin(command, config.tensor_parallel_size, shares_experts=config.enable_expert_parallel)
        except RequestError as error:
            self._refuse(command, error.status, error.message)

    def _why_not_ready(self, actor: str) -> str:
        child = self._engine.children.get(actor)
        return "" if child is not None and child.is_ready else f"{spoken(actor)} is not ready; try again in a moment"

    def _tell(self, actor: str, command: Command) -> str:
        """Put a command on an actor's control ring; return why that failed, or an empty string."""
        trouble = self._why_not_ready(actor)
        if trouble:
            return trouble
        if actor not in self._senders:
            self._senders[actor] = MailboxSender.attach(self._engine.config.run_id, actor, SUPERVISOR, _SUPERVISOR_EPOCH)
        command.epoch = self._engine.children[actor].epoch
        is_sent = self._senders[actor].try_send(encode(command))
        return "" if is_sent else f"the control ring of {spoken(actor)} is full; try again in a moment"

    def _refuse(self, command: Command, status: int, message: str) -> None:
        self._server.reply(Reply(command.command_id, status, message))


def _row(actor: ActorSnapshot, now_ns: int) -> dict[str, int | float | str | None]:
    """Return an actor for ListActors: the names of the table, and the age of the heartbeat."""
    return {
        "name": actor.name,
        "role": actor.role,
        "rank": actor.rank,
        "pid": actor.pid,
        "epoch": actor.epoch,
        "state": actor.state.name,
        "heartbeat_age_s": round((now_ns - actor.heartbeat_ns) / 1e9, 3) if actor.heartbeat_ns else None,
        "step": actor.step,
        "restarts": actor.restarts,
    }
