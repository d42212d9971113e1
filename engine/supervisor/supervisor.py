"""The supervisor: owns a run, starts its children in parallel, restarts them when they die, and stops them in order.

Runs in the process of `tokamak serve` (`engine/supervisor/launch.py`). One loop waits for everything: children's pidfds,
operators' commands, actors' events and signals. It imports nothing heavy, and it has its own row and heartbeat in the actor
table.

    STARTING   until every child was READY once; a child that dies before that ends the start with its cause
    SERVING    a child that dies is restarted with the next epoch, later if it dies often (`restarts.py`); too many deaths of
               one child end the engine. If the supervisor itself cannot get a resource (a process, a descriptor, space), it
               retries, and reports that in the error log, which /health reads
    STOPPING   role by role, in the order in which a request passes them: SIGTERM, and SIGKILL after `stop_timeout_s`
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from enum import Enum
from signal import SIGKILL, SIGTERM, SIGUSR1
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import EXIT_BAD_OPTIONS, EXIT_FAILED, StartError, TokamakError
from engine.messages import ActorState, Membership, Reply
from engine.process.actor import LOOK_INTERVAL_NS, USAGE_INTERVAL_NS, write_usage
from engine.process.events import EventChannel
from engine.process.run_directory import Run
from engine.process.segments import RunSegments
from engine.process.topology import STOP_ORDER, SUPERVISOR, ActorPlan, role_of
from engine.supervisor.child_process import Child, describe_exit, spawn
from engine.supervisor.commands import SupervisorCommands
from engine.supervisor.hangs import HangAction
from engine.supervisor.keeper import RunKeeper
from engine.supervisor.log_relay import LogRelay
from engine.supervisor.progress import Progress
from engine.supervisor.restarts import HEALTHY_S, RestartTable
from engine.supervisor.signals import SignalCatcher
from shm.counters import State
from shm.memory import num_oom_kills
from shm.process import ProcessIdentity

if TYPE_CHECKING:
    import zmq

    from engine.process.control import ControlServer

_STARTING_STATES = (State.SPAWNED, State.ATTACHED, State.LOADING)
_REMEDY = (
    "; raise the memory limit of the container or machine, or use a smaller model, --quantization wint4 or a smaller "
    "--kv-cache-memory"
)
OUT_OF_MEMORY = f" (out of memory: the kernel killed it){_REMEDY}"
LIKELY_OUT_OF_MEMORY = f" (probably out of memory){_REMEDY}"  # the kernel does not count kills by a container's manager
_SHORT_GRACE_S = 2.0  # between SIGTERM and SIGKILL if there is nothing to wait for


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class _Start(msgspec.Struct):
    """A life that has not begun yet."""

    plan: ActorPlan
    epoch: int
    at_s: float = 0.0  # monotonic


class Supervisor:
    """Supervises the children of `plan` in `run`, with existing segments. `live` runs it; `on_ready` is called once."""

    def __init__(
        self,
        run: Run,
        lock: int,
        config: EngineConfig,
        plan: Sequence[ActorPlan],
        segments: RunSegments,
        progress: Progress,
        on_ready: Callable[[], None] = lambda: None,
        listener_fd: int = -1,
        relay: LogRelay | None = None,
    ) -> None:
        """`listener_fd`: of a listening socket for the api processes; -1: each has its own. `relay`: shows the actors' logs on
        stderr."""
        self.config = config
        self.plan = tuple(plan)
        self.segments = segments
        self.children: dict[str, Child] = {}
        self.run = run
        self._progress = progress
        self._on_ready = on_ready
        self._listener_fd = listener_fd
        self._relay = relay
        self._phase = Phase.STARTING
        self._exit_code = 0
        self._num_oom_kills = num_oom_kills()
        self._texts: dict[str, str] = {}  # progress texts of starting children
        self._stop_roles: list[str] = []  # still to be stopped
        counters = segments.counters
        self._rows = {name: counters.actor(name) for name in (SUPERVISOR, *(plan.name for plan in self.plan))}
        self._num_restarts = counters.counter("actor_restarts_total", SUPERVISOR)
        self._num_hangs = counters.counter("actor_hangs_total", SUPERVISOR)
        self._num_lines_dropped = counters.counter("supervisor_lines_dropped_total", SUPERVISOR)
        self._cpu = counters.counter("cpu_seconds_total", SUPERVISOR)
        self._memory = counters.counter("resident_memory_bytes", SUPERVISOR)
        self._next_usage_ns = 0
        self._starts: dict[str, _Start] = {}  # waiting for their time
        self._restarts = RestartTable(config.restart_limit, config.restart_window_s)
        self._lock = lock
        self._events = EventChannel()
        self._open_until_end = contextlib.ExitStack()
        self._open_until_end.callback(self._events.close)

    # ------------------------------------------------------------------------------------------------------ life

    def live(self, signals: SignalCatcher) -> int:
        """Start all children, supervise them until the end, and return the engine's exit code. Leaves no child running."""
        try:
            self._rows[SUPERVISOR].begin_epoch(1, time.monotonic_ns())
            self._rows[SUPERVISOR].set_process(ProcessIdentity.of())
            self._rows[SUPERVISOR].set_state(State.LOADING)
            for plan in reversed(self.plan):  # workers first: they take longest
                self._start_first(plan)
            self._listen(signals)
            while self._phase is not Phase.STOPPING or self.children:
                self._turn(signals)
            self._rows[SUPERVISOR].set_state(State.STOPPED)
            return self._exit_code
        finally:
            self._kill_all()
            for child in self.children.values():
                child.reap()
            self._progress.end()
            self._open_until_end.close()

    def _listen(self, signals: SignalCatcher) -> None:
        """Open the sockets for commands while the children start: importing ZeroMQ takes as long as starting them."""
        import zmq

        from engine.process.control import ControlServer

        self._server: ControlServer = ControlServer(self.run)
        self._open_until_end.callback(self._server.close)
        self._keeper = RunKeeper(self.run, self._lock, self.segments, self._server, self._progress)
        self._open_until_end.callback(self._keeper.close)
        self._orders = SupervisorCommands(self, self._server)
        self._poller: zmq.Poller = zmq.Poller()
        self._readable = zmq.POLLIN
        ends = [child.pidfd for child in self.children.values()]
        for source in (signals.fileno(), self._server.control, self._events.fileno(), *ends):
            self._poller.register(source, self._readable)

    @property
    def is_serving(self) -> bool:
        return self._phase is Phase.SERVING

    def stop(self, reason: str) -> None:
        """Stop the engine in order; at once if called a second time."""
        if self._phase is Phase.STOPPING:
            self._kill_all()
            return
        self._progress.end()
        self._progress.note(f"stopping: {reason}")
        self._begin_stop(reason)

    def restart(self, name: str) -> None:
        """End `name` so that it is restarted; not counted as a crash."""
        child = self.children.get(name)
        if child is not None:
            child.is_asked_to_end = True
            drains = role_of(name) == "api"  # it has streams that may end; nothing waits for the others
            child.terminate(self.config.stop_timeout_s if drains else _SHORT_GRACE_S)
        self._restarts.forget_attempts(name)
        if name in self._starts:
            self._starts[name].at_s = 0.0

    def _turn(self, signals: SignalCatcher) -> None:
        """Wait for an event, at most until the next check of the heartbeats, and handle it."""
        ready = {source for source, _ in self._poller.poll(LOOK_INTERVAL_NS // 1_000_000)}
        now_ns = time.monotonic_ns()
        self._rows[SUPERVISOR].beat(now_ns)
        for caught in signals.caught():
            self.stop(caught.name)
        self._take_events()
        for command in self._server.commands():
            self._orders.handle(command)
        for child in [child for child in self.children.values() if child.pidfd in ready]:
            self._bury(child)
        self._watch(now_ns)
        if self._relay is not None:
            self._relay.look()
        if self._phase is not Phase.STOPPING:
            self._orders.adapters.advance(now_ns)
        for start in [start for start in self._starts.values() if now_ns >= start.at_s * 1e9]:
            self._attempt_together(start)
        if self._phase is Phase.STARTING:
            self._advance_start()
        elif self._phase is Phase.STOPPING:
            self._advance_stop()
        if now_ns >= self._next_usage_ns:
            self._next_usage_ns = now_ns + USAGE_INTERVAL_NS
            write_usage(self._cpu, self._memory)
            self._num_lines_dropped.set(self._progress.num_dropped)
            self._keeper.keep()

    # --------------------------------------------------------------------------------------------- start and stop

    def _advance_start(self) -> None:
        self._progress.show({plan.name: self._state_and_text(plan.name) for plan in self.plan})
        adapters = self._orders.adapters
        if adapters.failure:
            self._end_start(adapters.failure, adapters.is_mistake)
        elif len(self.children) == len(self.plan) and all(child.is_ready for child in self.children.values()):
            if not adapters.is_started:
                return
            self._phase = Phase.SERVING
            self._rows[SUPERVISOR].set_state(State.READY)
            self._progress.end()
            self._on_ready()

    def _state_and_text(self, name: str) -> tuple[State, str]:
        state = self._rows[name].state
        if state is State.LOADING:
            return state, self._texts.get(name, "")
        return State.READY if state is State.RUNNING else state, ""

    def _end_start(self, cause: str, is_mistake: bool) -> None:
        """Fail the start without a death: the engine cannot be what the options ask for."""
        self._fail(f"the engine cannot start: {cause}", None, is_mistake)

    def _fail(self, cause: str, dead: Child | None, is_mistake: bool = False) -> None:
        """End the engine; print its cause and the dead child's last lines on stderr. `is_mistake`: the user's, which prevents
        every start."""
        self._progress.end()
        lines = [f"  {dead.name}: {line}" for line in dead.last_lines()] if dead is not None else []
        self._progress.note("\n".join([*lines, f"tokamak: error: {cause}"]))
        self.segments.counters.errors.record(SUPERVISOR, cause)
        self._exit_code = EXIT_BAD_OPTIONS if is_mistake else EXIT_FAILED
        is_starting = self._phase is Phase.STARTING
        self._begin_stop(cause)
        if is_starting:
            self._kill_all()  # no client waits for an answer yet

    def _begin_stop(self, reason: str) -> None:
        self._phase = Phase.STOPPING
        self._starts.clear()
        self._rows[SUPERVISOR].set_state(State.DRAINING)
        self._orders.refuse_open(reason)
        own = {role_of(plan.name) for plan in self.plan}
        self._stop_roles = [*(role for role in STOP_ORDER if role in own), *sorted(own - set(STOP_ORDER))]
        self._terminate_next_role()

    def _advance_stop(self) -> None:
        """Stop the next role once the previous one has ended."""
        while self._stop_roles and not any(role_of(name) == self._stop_roles[0] for name in self.children):
            self._stop_roles.pop(0)
            self._terminate_next_role()

    def _terminate_next_role(self) -> None:
        for child in self.children.values():
            if self._stop_roles and role_of(child.name) == self._stop_roles[0]:
                child.terminate(_SHORT_GRACE_S if self._exit_code else self.config.stop_timeout_s)

    def _kill_all(self) -> None:
        for child in self.children.values():
            child.send_signal(SIGKILL)

    # -------------------------------------------------------------------------------------------------- children

    def _start_first(self, plan: ActorPlan) -> None:
        try:
            self._start_child(plan, 1)
        except OSError as error:
            raise StartError(f"cannot start {plan.name}: {error}; free this resource and start again") from error

    def _start_child(self, plan: ActorPlan, epoch: int) -> Child:
        row = self._rows[plan.name]
        row.begin_epoch(epoch, time.monotonic_ns())  # before the process exists: from here on the row belongs to it
        child = spawn(self.run, self.config, plan, epoch, self.segments, self._events.sender, self._listener_fd)
        row.set_process(child.identity)
        self.children[plan.name] = child
        return child

    def _bury(self, child: Child) -> None:
        """Collect a dead child and decide what follows."""
        self._poller.unregister(child.pidfd)
        self._take_events()  # an actor that failed announced why before it ended
        del self.children[child.name]
        code = child.reap()
        how = describe_exit(code)
        if code == -SIGKILL and num_oom_kills() > self._num_oom_kills:
            self._num_oom_kills = num_oom_kills()
            how += OUT_OF_MEMORY
        if self._phase is Phase.STOPPING:
            return
        row = self._rows[child.name]
        row.set_state(State.DEAD)
        cause = f"{child.name} died: {child.failure or how}"
        if role_of(child.name) == "worker":
            self.segments.evict(child.name)
            self._end_peers(child)
        self._orders.actor_died(child.name, cause)
        if self._phase is Phase.STARTING and not child.is_ready and not child.is_asked_to_end:
            hint = LIKELY_OUT_OF_MEMORY if how == describe_exit(-SIGKILL) and not child.failure else ""
            self._fail(f"the engine cannot start: {cause}{hint}", child, child.is_mistake)
        elif child.is_asked_to_end or self._may_go_on(child):
            self._start_again(child, cause)
        else:
            table = self._restarts
            self._fail(f"{cause}; reached {table.limit} deaths within {table.window_s:g} s (--restart-limit)", child)

    def _may_go_on(self, dead: Child) -> bool:
        """Return whether an actor that died may be restarted; causes from outside are not counted as its death."""
        is_from_outside = dead.is_failure_from_outside or self.segments.blame_file(dead.name)
        return is_from_outside or self._restarts.record_death(dead.name, time.monotonic())

    def _end_peers(self, dead: Child) -> None:
        """End all ranks of a group that cannot lose one, so that they begin their next life together. That counts as one
        death."""
        for name in self._peers(dead.name):
            peer = self.children.get(name)
            if peer is None:
                self._starts[name].epoch = dead.epoch + 1
            elif peer.epoch == dead.epoch and not peer.is_asked_to_end:
                peer.is_asked_to_end = True
                peer.failure = f"stopped because {dead.name} died and its rank group cannot continue"
                peer.send_signal(SIGKILL)

    def _peers(self, name: str) -> list[str]:
        """Return the actors that restart together with this one."""
        return self.segments.peers_of(name) if role_of(name) == "worker" and self.config.are_rank_groups_whole else []

    def _start_again(self, dead: Child, cause: str) -> None:
        if not dead.is_asked_to_end:
            self._num_restarts.add(1)
            self._rows[dead.name].add_restart()
        if dead.is_asked_to_end or (dead.is_ready and time.monotonic() - dead.ready_s >= HEALTHY_S):
            self._restarts.forget_attempts(dead.name)
        start = _Start(dead.plan, dead.epoch + 1)
        delay_s = self._put_off(start)
        when = f" in {delay_s:g} s" if delay_s else ""
        self._progress.note(f"{cause}; restarted with epoch {start.epoch}{when}")
        if not dead.is_asked_to_end:
            self.segments.counters.errors.record(dead.name, cause)
        if not delay_s:
            self._attempt_together(start)

    def _put_off(self, start: _Start) -> float:
        """Put a start off until its time; return the seconds until then."""
        delay_s = self._restarts.next_delay_s(start.plan.name)
        start.at_s = time.monotonic() + delay_s
        self._starts[start.plan.name] = start
        return delay_s

    def _attempt_together(self, start: _Start) -> None:
        """Restart a child once all ranks of its group have ended their last lives."""
        if all(self.children[peer].epoch == start.epoch for peer in self._peers(start.plan.name) if peer in self.children):
            self._attempt(start)

    def _attempt(self, start: _Start) -> None:
        """Restart a child; if that is not possible now, retry later."""
        name = start.plan.name
        del self._starts[name]
        try:
            self._keeper.make_again()
            child = self._start_child(start.plan, start.epoch)
            self._poller.register(child.pidfd, self._readable)
        except (OSError, TokamakError) as error:
            self._rows[name].set_state(State.DEAD)
            delay_s = self._put_off(start)
            trouble = f"{name} cannot be started: {error}"
            self.segments.counters.errors.record(name, trouble)
            self._progress.note(f"{trouble}; retrying in {delay_s:g} s")

    def _watch(self, now_ns: int) -> None:
        """Act on hangs, and on children that ignored SIGTERM for too long."""
        now_s = now_ns / 1e9
        for child in self.children.values():
            if now_s >= child.kill_at_s:
                child.send_signal(SIGKILL)
            if self._phase is not Phase.STOPPING:
                self._watch_heartbeat(child, now_ns)

    def _watch_heartbeat(self, child: Child, now_ns: int) -> None:
        row = self._rows[child.name]
        limit_s = self.config.load_timeout_s if row.state in _STARTING_STATES else self.config.hang_timeout_s
        match child.watch.look(now_ns, row.heartbeat_ns, int(limit_s * 1e9)):
            case HangAction.DUMP:
                text = f"no heartbeat for {limit_s:g} s; stack traces are in {child.log_path}"
                self._progress.note(f"{child.name} hangs{self._step_of(child.name)}: {text}")
                child.send_signal(SIGUSR1)
            case HangAction.TERMINATE:
                self._num_hangs.add(1)
                child.failure = f"hung, no heartbeat for {limit_s:g} s while {row.state.name}"
                child.send_signal(SIGTERM)
            case HangAction.KILL:
                child.send_signal(SIGKILL)

    def _step_of(self, name: str) -> str:
        """Return a short text about a rank's step."""
        if role_of(name) != "worker":
            return ""
        return f" in step {self.segments.counters.counter('worker_step', name).value:.0f}"

    # ---------------------------------------------------------------------------------------------------- events

    def _take_events(self) -> None:
        for event in self._events.received():
            match event:
                case ActorState():
                    self._take_state(event)
                case Membership():
                    self._take_membership(event)
                case Reply():
                    self._keeper.keep()  # the record is safe before the reply is sent
                    self._orders.answer(event)
                case _:
                    raise AssertionError(f"no event: {event}")

    def _take_state(self, event: ActorState) -> None:
        child = self.children.get(event.actor)
        if child is None or child.epoch != event.epoch:
            return  # of an earlier life
        if event.state == State.READY.name:
            child.ready_s = time.monotonic()
            if role_of(child.name) == "worker":
                self.segments.set_member(child.name, child.takes_part)
            self._orders.actor_ready(child.name)
        elif event.state == State.FAILED.name:
            child.failure, child.is_failure_from_outside, child.is_mistake = event.text, event.is_from_outside, event.is_mistake
        else:
            self._texts[child.name] = event.text

    def _take_membership(self, event: Membership) -> None:
        child = self.children.get(event.actor)
        if child is not None and child.epoch == event.epoch:
            child.takes_part = event.is_member
            if child.is_ready:
                self.segments.set_member(child.name, event.is_member)
