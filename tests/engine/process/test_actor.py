"""An actor's loop on real rings, turn by turn in one process; and that idle processes sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError, TokamakError
from engine.messages import Abort, Command, Control, ListActors, Message, Reply, WeightsState, encode
from engine.process.actor import LOOK_INTERVAL_NS, Actor, ActorLoop, run
from engine.process.context import ActorContext
from engine.process.events import EventChannel
from engine.process.run_directory import Run, WeightsRecord, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from shm.counters import State
from shm.mailbox import MailboxSender
from tests.engine.echo_engine import EchoEngine
from tests.engine.process.test_run import configuration
from tests.waiting import wait_until

NAMES = ("left0", "right0")


class Recorder(Actor):
    """Actor that records its messages and works off `num_todo`."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.messages: list[tuple[str, Message]] = []
        self.peers: list[tuple[str, int]] = []
        self.num_todo = 0
        self.timer_ns = 0

    def on_message(self, sender: str, message: Message) -> None:
        self.messages.append((sender, message))

    def on_peer(self, name: str, epoch: int) -> None:
        self.peers.append((name, epoch))

    def do_work(self) -> int:
        done, self.num_todo = self.num_todo, 0
        return done

    def deadline_ns(self) -> int:
        return self.timer_ns


class Engine:
    """The segments of a run of two actors, without processes."""

    def __init__(self, directory: Path) -> None:
        self.config: EngineConfig = configuration(new_run_id(), directory)
        self.run = Run(self.config.run_id, directory)
        self.segments = RunSegments.of(self.config, NAMES)
        self.events = EventChannel()
        self.received: list[Control] = []
        for name in NAMES:
            self.segments.counters.actor(name).begin_epoch(1, 0)

    def context(self, name: str, epoch: int = 1) -> ActorContext:
        return ActorContext(self.run, self.config, name, epoch, events_fd=self.events.sender)

    def event(self) -> Control:
        """Return the next event that was sent."""
        self.received += self.events.received()
        return self.received.pop(0)

    def close(self) -> None:
        self.events.close()
        self.segments.close()
        unlink_segments(self.run.run_id)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def left(engine: Engine) -> Iterator[Recorder]:
    actor = Recorder(engine.context("left0"))
    yield actor
    actor.context.close()


def test_messages_are_taken_and_counted(engine: Engine, left: Recorder) -> None:
    right = engine.context("right0")
    loop = ActorLoop(left)
    assert loop.turn() == 0
    for number in range(300):
        assert right.outbox("left0").send(Abort(str(number), number))
    assert loop.turn() == 256  # bounded, so that a flood leaves time for the step
    assert loop.turn() == 44
    assert left.messages == [("right0", Abort(str(number), number)) for number in range(300)]
    assert left.context.counter("messages_received_total").value == 300
    assert right.counter("messages_sent_total").value == 300
    right.close()


def test_many_messages_that_take_long_are_no_hang(engine: Engine) -> None:
    heartbeats: list[int] = []

    class Slow(Actor):
        def on_message(self, sender: str, message: Message) -> None:
            heartbeats.append(self.context.row.heartbeat_ns)

    left, right = engine.context("left0"), engine.context("right0")
    for number in range(3):
        right.outbox("left0").send(Abort(str(number), number))
    ActorLoop(Slow(left)).turn()
    assert len(set(heartbeats)) == 3
    left.close()
    right.close()


def test_a_full_ring_refuses_and_counts(engine: Engine, left: Recorder) -> None:
    outbox = left.context.outbox("right0")
    big = Abort("x" * (outbox.max_record_bytes // 4), 0)
    num_sent = 0
    while outbox.send(big):
        num_sent += 1
    assert num_sent >= 3
    assert outbox.fill_bytes > 0
    assert left.context.counter("ring_full_total").value == 1
    assert left.context.counter("messages_sent_total").value == num_sent


def test_heartbeat_step_and_state(engine: Engine, left: Recorder) -> None:
    row = engine.segments.counters.actor("left0")
    loop = ActorLoop(left)
    left.context.announce_ready()
    assert row.state is State.READY
    before_ns = time.monotonic_ns()
    loop.turn()
    assert row.heartbeat_ns >= before_ns
    assert (row.step, row.state) == (0, State.READY)
    left.num_todo = 1
    loop.turn()
    assert (row.step, row.state) == (1, State.RUNNING)
    loop.wait()  # a whole interval without work
    assert row.state is State.READY
    left.context.row.set_state(State.PAUSED)
    left.num_todo = 1
    loop.turn()
    assert row.state is State.PAUSED  # the actor's own


def test_the_wait_ends_at_the_actors_timer(left: Recorder) -> None:
    loop = ActorLoop(left)
    left.timer_ns = time.monotonic_ns() - 1
    loop.wait()
    left.timer_ns = time.monotonic_ns() + LOOK_INTERVAL_NS // 10
    loop.wait()
    assert time.monotonic_ns() >= left.timer_ns


def test_restarted_peer_is_noticed_once(engine: Engine, left: Recorder) -> None:
    loop = ActorLoop(left)
    loop.turn()
    row = engine.segments.counters.actor("right0")
    row.set_state(State.DEAD)
    row.begin_epoch(2, 0)
    wait_until(lambda: loop.turn() == 0 and left.peers, what="the new epoch is noticed")
    for _ in range(3):
        loop.turn()
    assert left.peers == [("right0", 2)]
    assert left.context.peer_epoch("right0") == 2


def test_commands_for_a_predecessor_are_dropped(engine: Engine, left: Recorder) -> None:
    supervisor = MailboxSender.attach(engine.run.run_id, "left0", "supervisor", 1)
    for epoch in (2, 0, 1):
        supervisor.try_send(encode(Command(f"c{epoch}", ListActors(), epoch)))
    ActorLoop(left).turn()
    for epoch in (0, 1):
        assert engine.event() == Reply(f"c{epoch}", 400, "left0 does not support the command ListActors")
    assert left.context.counter("messages_dropped_total").value == 1
    supervisor.close()


def test_a_failure_is_announced_everywhere(engine: Engine) -> None:
    def fail(context: ActorContext) -> Actor:
        raise CheckpointError("no such tensor")

    assert run(engine.context("left0"), fail) == 1
    event = engine.event()
    assert (event.actor, event.epoch, event.state, event.text) == ("left0", 1, "FAILED", "no such tensor")  # type: ignore[union-attr]
    assert engine.segments.counters.actor("left0").state is State.FAILED
    [entry] = engine.segments.counters.errors.entries()
    assert (entry.actor, entry.text) == ("left0", "no such tensor")


def test_a_whole_life(engine: Engine) -> None:
    stages: list[str] = []

    class Short(Actor):
        def on_start(self) -> None:
            stages.append(f"start {self.context.row.state.name}")

        def do_work(self) -> int:
            self.context.request_stop()
            return 0

        def on_stop(self) -> None:
            stages.append(f"stop {self.context.row.state.name}")

    assert run(engine.context("left0"), Short) == 0
    assert stages == ["start LOADING", "stop DRAINING"]
    assert engine.segments.counters.actor("left0").state is State.STOPPED


def test_peer_restarted_during_the_start_is_noticed(engine: Engine) -> None:
    """A worker sends its hello to the scheduler at the end of its start; a restarted scheduler must get one too."""
    peers: list[tuple[str, int]] = []

    class Slow(Actor):
        def on_start(self) -> None:
            engine.segments.counters.actor("right0").begin_epoch(2, 0)

        def on_peer(self, name: str, epoch: int) -> None:
            peers.append((name, epoch))

        def do_work(self) -> int:
            self.context.request_stop()
            return 0

    assert run(engine.context("left0"), Slow) == 0
    assert peers == [("right0", 2)]


def test_weights_and_arena(engine: Engine, left: Recorder) -> None:
    with pytest.raises(TokamakError, match=r"cannot read weights\.json"):
        left.context.weights_in_use()
    engine.run.write_weights(WeightsRecord.of_start(engine.config))
    assert left.context.weights_in_use() == ("/none", 1, "")
    engine.run.write_weights(WeightsRecord("/b", 2, 2, WeightsState.NORMAL, (("/b", 2),), {2: "b2"}))
    assert left.context.weights_in_use() == ("/b", 2, "b2")
    with pytest.raises(TokamakError, match="without the KV arena"):
        left.context.arena()
    context = ActorContext(engine.run, engine.config, "right0", 1, os.dup(engine.segments.arenas[0].fd))
    context.arena().buffer[0] = 7
    assert engine.segments.arenas[0].buffer[0] == 7
    context.close()


def test_idle_processes_sleep(tmp_path: Path) -> None:
    """An idle supervisor and two idle actors use less than a tenth of the time in CPU time."""
    with EchoEngine(tmp_path, "echo0=EchoActor,echo1=EchoActor") as engine:
        engine.wait_ready()
        pids = engine.pids()
        wait_until(lambda: engine.actor("echo0").state is State.READY, what="idle")
        spent_s, start_s = processor_seconds(pids), time.monotonic()
        wait_until(lambda: time.monotonic() > start_s + 2)
        assert processor_seconds(pids) - spent_s < (time.monotonic() - start_s) / 10
        assert engine.value("cpu_seconds_total", "echo0") > 0
        assert engine.value("resident_memory_bytes", "supervisor") > 1 << 20


def processor_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
