"""Small real actors for the tests of supervision; `tests/engine/echo_engine.py` runs them under the real supervisor."""

from __future__ import annotations

import os
import signal
import time

from engine.errors import CheckpointError
from engine.messages import Abort, AbortRequest, Command, Message, Pause, ReloadWeights, Reply
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.topology import SUPERVISOR
from shm.counters import State
from shm.death_notes import DeathNotes

PING_INTERVAL_NS = 10_000_000


class EchoActor(Actor):
    """Actor that sends each message back."""

    def on_message(self, sender: str, message: Message) -> None:
        self.context.outbox(sender).send(message)


class PingActor(Actor):
    """Actor that sends a message to every `echo*` each 10 ms; replies are counted in `messages_received_total`."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.restarted: list[tuple[str, int]] = []
        self._echoes = [name for name in context.peers() if name.startswith("echo")]
        self._next_ns = 0
        self._num_sent = 0

    def on_peer(self, name: str, epoch: int) -> None:
        self.restarted.append((name, epoch))
        self.context.counters.errors.record(self.context.name, f"saw {name} with epoch {epoch}")

    def deadline_ns(self) -> int:
        return self._next_ns

    def do_work(self) -> int:
        if time.monotonic_ns() < self._next_ns:
            return 0
        self._next_ns = time.monotonic_ns() + PING_INTERVAL_NS
        self._num_sent += 1
        for name in self._echoes:
            self.context.outbox(name).send(Abort(str(self._num_sent), 0))
        return 1


class SchedulerStandIn(Actor):
    """Actor named `scheduler`, so that it gets commands: answers some at once, some later, some never."""

    def on_command(self, command: Command) -> Reply | None:
        match command.order:
            case AbortRequest(request_id):
                return Reply(command.command_id, 200, f"aborted {request_id}", {"epoch": self.context.epoch})
            case ReloadWeights():
                self.context.events.send(Reply(command.command_id, 200, "later"))
                return None
            case Pause():
                return None
            case _:
                return super().on_command(command)


class FailingActor(Actor):
    """Actor that cannot start."""

    def on_start(self) -> None:
        raise CheckpointError("the weights are made of cheese; use others")


class KilledActor(Actor):
    """Actor that is killed while it starts, as by the out-of-memory killer."""

    def on_start(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class CrashingActor(Actor):
    """Actor that gets ready and then fails in its loop."""

    def do_work(self) -> int:
        raise RuntimeError("it broke")


class VictimActor(Actor):
    """Actor named `media0`, so that it has death notes: it opens a file that kills it, four times."""

    FILE = b"f" * 32

    def do_work(self) -> int:
        if self.context.counters.actor(SUPERVISOR).state is not State.READY:
            return 0
        notes = DeathNotes.attach(self.context.run.run_id, self.context.name)
        if notes.num_deaths(self.FILE) < 4:
            notes.open(self.FILE)
            signal.raise_signal(signal.SIGKILL)
        return 0


class SlowActor(Actor):
    """Actor with an endless start."""

    def on_start(self) -> None:
        while True:
            self.context.mailbox.wait(100_000_000)


class StuckActor(Actor):
    """Actor that gets ready and then never returns from a step."""

    def do_work(self) -> int:
        while True:
            self.context.mailbox.wait(100_000_000)


class StubbornActor(Actor):
    """Actor that never ends by itself."""

    def run(self) -> None:
        self.context.announce_ready()
        while True:
            self.context.row.beat(time.monotonic_ns())
            self.context.mailbox.wait(100_000_000)
