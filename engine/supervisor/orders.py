"""Operators' orders at the supervisor: what it answers itself, and what it forwards to the scheduler's control ring.

    ListActors, RestartActor, Shutdown     answered here
    everything else                        a Command on the scheduler's control ring; its Reply comes back as an event

Every order is answered once: when it is done, or with 503 when whoever was to carry it out died meanwhile.
"""

from __future__ import annotations

import time
from typing import Protocol

from engine.config import EngineConfig
from engine.messages import Command, ListActors, Reply, RestartActor, Shutdown, encode
from engine.process.control import ControlServer
from engine.process.segments import RunSegments
from engine.process.topology import SCHEDULER, SUPERVISOR, ActorPlan, actors_of, role_of
from engine.supervisor.child_process import Child
from shm.counters import ActorSnapshot
from shm.mailbox import MailboxSender

_SUPERVISOR_EPOCH = 1


class Engine(Protocol):
    """What orders are about: the supervisor's side of its children."""

    config: EngineConfig
    plan: tuple[ActorPlan, ...]
    segments: RunSegments
    children: dict[str, Child]

    @property
    def is_serving(self) -> bool:
        """Every child was ready once, and the engine does not stop."""

    def stop(self, reason: str) -> None:
        """End the engine in order."""

    def restart(self, name: str) -> None:
        """End `name` so that it is started again."""


class Orders:
    """Takes the orders for one engine."""

    def __init__(self, engine: Engine, server: ControlServer) -> None:
        self._engine = engine
        self._server = server
        self._scheduler: MailboxSender | None = None
        self._forwarded: set[str] = set()  # command ids that the scheduler has
        self._restarting: dict[str, list[str]] = {}  # actor -> command ids that wait until it is ready again

    def handle(self, command: Command) -> None:
        """Carry out or forward one order."""
        match command.order:
            case ListActors():
                self._list(command)
            case RestartActor(actor):
                self._restart(command, actor)
            case Shutdown():
                self._server.reply(Reply(command.command_id, 200, "the engine stops"))
                self._engine.stop("asked to stop by an operator")
            case _:
                self._forward(command)

    def answer(self, reply: Reply) -> None:
        """The scheduler's answer to what was forwarded."""
        self._forwarded.discard(reply.command_id)
        self._server.reply(reply)

    def actor_ready(self, name: str) -> None:
        """`name` came back: whoever asked for that gets the answer."""
        for command_id in self._restarting.pop(name, []):
            epoch = self._engine.children[name].epoch
            self._server.reply(Reply(command_id, 200, f"{name} is ready with epoch {epoch}", {"epoch": epoch}))

    def actor_died(self, name: str, cause: str) -> None:
        """What the dead scheduler was to do is not done by its successor."""
        if role_of(name) == SCHEDULER:
            message = f"the scheduler died meanwhile ({cause}); look at the state and ask again"
            for command_id in self._forwarded:
                self._server.reply(Reply(command_id, 503, message))
            self._forwarded.clear()

    def refuse_open(self, cause: str) -> None:
        """The engine ends: nothing that is open gets done."""
        waiting = [command_id for command_ids in self._restarting.values() for command_id in command_ids]
        for command_id in (*self._forwarded, *waiting):
            self._server.reply(Reply(command_id, 503, f"the engine ends: {cause}"))
        self._forwarded.clear()
        self._restarting.clear()

    def _list(self, command: Command) -> None:
        now_ns = time.monotonic_ns()
        rows = [_row(actor, now_ns) for actor in self._engine.segments.counters.actors()]
        self._server.reply(Reply(command.command_id, 200, "", {"actors": rows}))

    def _restart(self, command: Command, name: str) -> None:
        names = [plan.name for plan in self._engine.plan]
        if name == SUPERVISOR:
            self._refuse(command, 400, "the supervisor cannot be restarted; stop the engine and start it again")
        elif name not in names:
            self._refuse(command, 404, f"there is no actor {name!r}; there are {', '.join(names)}")
        elif not self._engine.is_serving:
            self._refuse(command, 503, "the engine is not ready yet, or stops; ask again when it serves")
        else:
            self._restarting.setdefault(name, []).append(command.command_id)
            self._engine.restart(name)

    def _forward(self, command: Command) -> None:
        child = next((self._engine.children[name] for name in actors_of(SCHEDULER, self._engine.children)), None)
        if not self._engine.is_serving or child is None or not child.is_ready:
            self._refuse(command, 503, "the scheduler is not ready; ask again in a moment")
            return
        if self._scheduler is None:
            run_id = self._engine.config.run_id
            self._scheduler = MailboxSender.attach(run_id, child.name, SUPERVISOR, _SUPERVISOR_EPOCH)
        if self._scheduler.try_send(encode(Command(command.command_id, command.order, child.epoch))):
            self._forwarded.add(command.command_id)
        else:
            self._refuse(command, 503, "the scheduler's control ring is full; ask again in a moment")

    def _refuse(self, command: Command, status: int, message: str) -> None:
        self._server.reply(Reply(command.command_id, status, message))


def _row(actor: ActorSnapshot, now_ns: int) -> dict[str, int | float | str | None]:
    """An actor for ListActors: the same names as in the table, and the heartbeat's age."""
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
