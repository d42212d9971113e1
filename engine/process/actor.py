"""Base of every actor: a process with a mailbox, a row in the actor table and a work loop.

Every process of the engine except the supervisor runs one `Actor`; `engine/process/main.py` creates its `ActorContext`
(everything it shares with the others) and calls `run`. A subclass defines how messages, commands and work are handled. The loop
here does the rest: it drains the mailbox, notices restarted peers, writes the heartbeat, counts, and sleeps when there is
nothing to do.

    class Echo(Actor):
        def on_message(self, sender: str, message: Message) -> None:
            self.context.outbox(sender).send(message)

Tests call `ActorLoop(actor).turn()` in one process on real rings.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import time
from collections.abc import Callable

from engine.errors import TokamakError
from engine.messages import Command, Message, Reply, decode, decode_control
from engine.process.context import ActorContext
from engine.process.topology import SUPERVISOR
from shm.counters import Cell, State

LOOK_INTERVAL_NS = 100_000_000  # longest wait of an idle loop: then it writes the heartbeat and checks the peers' epochs
USAGE_INTERVAL_NS = 1_000_000_000
MAX_RECORDS_PER_TURN = 256

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Actor:
    """Base of every actor. All hooks run in one thread, the loop's."""

    def __init__(self, context: ActorContext) -> None:
        self.context = context

    def on_start(self) -> None:
        """Prepare the actor. May take long; then call `context.row.beat(...)` now and then."""

    def on_record(self, sender: str, record: bytes) -> Message:
        """Decode a record of the mailbox. An actor that forwards records undecoded overrides it."""
        message = decode(record)
        self.on_message(sender, message)
        return message

    def on_message(self, sender: str, message: Message) -> None:
        """Take a message."""

    def on_command(self, command: Command) -> Reply | None:
        """Carry out an operator's command. None: the reply comes later, by `context.events.send(Reply(...))`."""
        return Reply(
            command.command_id, 400, f"{self.context.name} does not support the command {type(command.order).__name__}"
        )

    def on_peer(self, name: str, epoch: int) -> None:
        """Called when `name` was restarted and has this epoch now."""

    def do_work(self) -> int:
        """Do a bounded amount of work; return how many things were done. 0 means idle: the loop then waits."""
        return 0

    def wait(self, timeout_ns: int) -> None:
        """Sleep until there may be work, at most `timeout_ns`."""
        self.context.mailbox.wait(timeout_ns)

    def deadline_ns(self) -> int:
        """CLOCK_MONOTONIC time of the next timer, at which `do_work` must run; 0: none."""
        return 0

    def on_stop(self) -> None:
        """Called on a request to end: finish shortly. Peers behind this actor still run."""

    def run(self) -> None:
        """Run the whole life: `on_start`, the loop, `on_stop`. The api overrides it with its event loop."""
        self.context.row.set_state(State.LOADING)
        loop = ActorLoop(self)  # before the start: a peer that restarts meanwhile counts as restarted
        self.on_start()
        end_start()
        self.context.announce_ready()
        while not self.context.is_stopping:
            if loop.turn() == 0:
                loop.wait()
        self.context.row.set_state(State.DRAINING)
        self.on_stop()


class ActorLoop:
    """One actor's turns: mailbox, peers, work, heartbeat. An actor with its own event loop calls `turn` from there, whenever
    its mailbox has messages and at least every 100 ms."""

    def __init__(self, actor: Actor) -> None:
        context = actor.context
        self._actor = actor
        self._context = context
        self._received = context.counter("messages_received_total")
        self._dropped = context.counter("messages_dropped_total")
        self._cpu = context.counter("cpu_seconds_total")
        self._memory = context.counter("resident_memory_bytes")
        self._peers = {name: context.peer_epoch(name) for name in context.peers()}
        self._next_look_ns = 0
        self._next_usage_ns = 0
        self._is_busy = False

    def turn(self) -> int:
        """Write the heartbeat, take messages (a limited number), check the peers if it is time, then work. Return the number of
        things done."""
        now_ns = time.monotonic_ns()
        self._context.row.beat(now_ns)
        if now_ns >= self._next_look_ns:
            self._look_around(now_ns)
        num_done = self._receive() + self._actor.do_work()
        if num_done:
            self._context.row.advance_step()
            self._note_busy(True)
        return num_done

    def wait(self) -> None:
        """Sleep until a message, the actor's timer or the next check of the peers, whichever is first."""
        now_ns = time.monotonic_ns()
        wake_ns = now_ns + LOOK_INTERVAL_NS
        deadline_ns = self._actor.deadline_ns()
        if deadline_ns:
            wake_ns = min(wake_ns, deadline_ns)
        if wake_ns <= now_ns:
            return
        self._actor.wait(wake_ns - now_ns)
        if time.monotonic_ns() - now_ns >= LOOK_INTERVAL_NS:
            self._note_busy(False)  # a whole interval without work

    def _receive(self) -> int:
        records = self._context.mailbox.receive(MAX_RECORDS_PER_TURN)
        for sender, payload in records:
            self._context.row.beat(time.monotonic_ns())  # many slow messages are not a hang
            if sender == SUPERVISOR:
                self._take_command(payload)
            elif self._context.tracer.is_on:
                self._trace_message(sender, payload)
            else:
                self._actor.on_record(sender, payload)
        if records:
            self._received.add(len(records))
        return len(records)

    def _trace_message(self, sender: str, payload: bytes) -> None:
        begin_ns = time.monotonic_ns()
        message = self._actor.on_record(sender, payload)
        self._context.tracer.span(type(message).__name__, begin_ns, value=len(payload), label=f"from {sender}")

    def _take_command(self, payload: bytes) -> None:
        command = decode_control(payload)
        assert isinstance(command, Command), command
        if command.epoch not in (0, self._context.epoch):
            self._dropped.add(1)  # meant for an earlier life; its sender was informed
            return
        reply = self._actor.on_command(command)
        if reply is not None:
            self._context.events.send(reply)

    def _look_around(self, now_ns: int) -> None:
        self._next_look_ns = now_ns + LOOK_INTERVAL_NS
        self._context.tracer.look()
        for name, known_epoch in self._peers.items():
            epoch = self._context.peer_epoch(name)
            if epoch != known_epoch:
                self._peers[name] = epoch
                self._actor.on_peer(name, epoch)
        if now_ns >= self._next_usage_ns:
            self._next_usage_ns = now_ns + USAGE_INTERVAL_NS
            write_usage(self._cpu, self._memory)

    def _note_busy(self, is_busy: bool) -> None:
        """Switch between READY and RUNNING. Any other state (PAUSED) is set by the actor itself and stays."""
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        before, after = (State.READY, State.RUNNING) if is_busy else (State.RUNNING, State.READY)
        if self._context.row.state == before:
            self._context.row.set_state(after)


def run(context: ActorContext, make_actor: Callable[[ActorContext], Actor]) -> int:
    """Create the actor, run it and return the exit code of its process. An error is announced, then ends the process; the
    supervisor decides what follows."""
    try:
        make_actor(context).run()
    except Exception as error:
        named = None
        if context.config.plugins:
            from engine.plugins import error_of_plugin

            named = error_of_plugin(error)
        context.announce_failure(named or explained(error))
        return 1
    else:
        context.row.set_state(State.STOPPED)
        return 0
    finally:
        context.close()


def explained(error: Exception) -> Exception:
    """Add the limit that caused a lack of memory, if the process has one."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if not is_memory or limit == resource.RLIM_INFINITY:
        return error
    text = f"out of memory: the address space of a process is limited to {limit / 2**30:.2f} GiB; raise `ulimit -v`"
    return TokamakError(text)


def end_start() -> None:
    """Exclude the objects of the start from garbage collection, and turn collection on."""
    gc.freeze()
    gc.enable()


def write_usage(cpu: Cell, memory: Cell) -> None:
    """Write processor time and resident memory of this process to its cells."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu.set(usage.ru_utime + usage.ru_stime)
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as statm:  # no descriptor is free: next time
        memory.set(int(statm.read().split()[1]) * _PAGE_BYTES)
