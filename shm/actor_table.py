"""The actor table in the counters file: identity, epoch, state and heartbeat of each actor.

The supervisor writes an actor's identity, SPAWNED before the process exists and DEAD after it has ended; in between the actor
writes its own state, heartbeat and step. All other processes only read.
"""

from __future__ import annotations

import enum

import msgspec

from shm import _native
from shm.layout import StructView, offset_of, size_of
from shm.process import ProcessIdentity

ROW_BYTES = size_of("ActorLines")


class State(enum.IntEnum):
    """State of an actor. SPAWNED and DEAD are written by the supervisor, the others by the actor."""

    SPAWNED = 0
    ATTACHED = 1
    LOADING = 2
    READY = 3
    RUNNING = 4
    PAUSED = 5
    DRAINING = 6
    STOPPED = 7
    FAILED = 8
    DEAD = 9


class ActorSnapshot(msgspec.Struct, frozen=True):
    """Snapshot of a row, read without a lock, so one word may be newer than another."""

    name: str
    role: str
    rank: int
    pid: int
    start_ticks: int
    epoch: int
    state: State
    heartbeat_ns: int  # CLOCK_MONOTONIC
    step: int
    restarts: int


class ActorRow:
    """Live row of one actor."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._view = StructView("ActorLines", buffer, offset)
        self.name = self._view.text("name")
        self.role = self._view.text("role")
        self.rank = self._view.word("rank")
        begin = offset + offset_of("ActorLines", "heartbeat_ns")
        self.heartbeat_word = buffer[begin : begin + 8]  # for native code of the work loop's thread, like `beat`
        self._heartbeat = _native.Cell(buffer, offset + offset_of("ActorLines", "heartbeat_ns"))
        self._step = _native.Cell(buffer, offset + offset_of("ActorLines", "step"))

    @property
    def state(self) -> State:
        return State(self._view.word("state"))

    @property
    def epoch(self) -> int:
        """Number of the actor's life, from 1."""
        return self._view.word("epoch")

    def advance_epoch(self) -> None:
        """Begin the next life of an actor without a process: a place of a router. Called by the link."""
        self._view.set_word("epoch", self.epoch + 1)

    @property
    def pid(self) -> int:
        """Process id; 0 until the life of this epoch has started."""
        return self._view.word("pid")

    @property
    def start_ticks(self) -> int:
        return self._view.word("start_ticks")

    @property
    def heartbeat_ns(self) -> int:
        return int(self._heartbeat.value)

    @property
    def step(self) -> int:
        return int(self._step.value)

    @property
    def restarts(self) -> int:
        return self._view.word("restarts")

    def set_state(self, state: State) -> None:
        self._view.set_word("state", state)

    def beat(self, now_ns: int) -> None:
        """Write the heartbeat `now_ns` (CLOCK_MONOTONIC). Called by the actor's work loop alone."""
        self._heartbeat.set(now_ns)

    def advance_step(self) -> None:
        """Count a step of the work loop that did something."""
        self._step.add(1)

    def begin_epoch(self, epoch: int, now_ns: int) -> None:
        """Begin a life, before its process starts. Called by the supervisor. The epoch is written last, for its readers."""
        self._view.set_word("pid", 0)
        self._view.set_word("start_ticks", 0)
        self.set_state(State.SPAWNED)
        self.beat(now_ns)
        self._view.set_word("epoch", epoch)

    def set_process(self, process: ProcessIdentity) -> None:
        """Write the process of this life once it exists. Called by the supervisor."""
        self._view.set_word("start_ticks", process.start_ticks)
        self._view.set_word("pid", process.pid)

    def add_restart(self) -> None:
        """Count a restart. Called by the supervisor."""
        self._view.set_word("restarts", self.restarts + 1)

    def snapshot(self) -> ActorSnapshot:
        return ActorSnapshot(
            name=self.name,
            role=self.role,
            rank=self.rank,
            pid=self.pid,
            start_ticks=self.start_ticks,
            epoch=self.epoch,
            state=self.state,
            heartbeat_ns=self.heartbeat_ns,
            step=self.step,
            restarts=self.restarts,
        )


def role_of(name: str) -> str:
    """Return the role, such as `api` of `api0`."""
    return name.rstrip("0123456789")


def write_row(buffer: memoryview, offset: int, name: str) -> None:
    """Write the row of a new actor. Called by the creator of the file."""
    role = role_of(name)
    view = StructView("ActorLines", buffer, offset)
    view.set_text("name", name)
    view.set_text("role", role)
    view.set_word("rank", int(name[len(role) :] or 0))
