"""The worker actor: one rank. Takes Steps from the scheduler's broadcast ring, runs them, and returns the results.

Run by `engine.process.main` as `worker<rank>`. Owns the rank's weights, slots and plan; the mapped KV arena outlives it. It
loads the weights (LOADING, with progress), joins the broadcast ring at its tail, sends a Hello to the scheduler, and then
handles one record per turn, so that it sees the control ring and SIGTERM between two steps. If the scheduler's ring is full,
results wait here in order.

    rank.py        parts of a rank             step_loops.py    when it runs which step
    loading.py     its weights                 step_runs.py     a step from its start to its result
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.messages import (
    ClearWeights,
    Command,
    CompileGrammar,
    GrammarCompiled,
    Hello,
    LoadAdapter,
    LoadWeights,
    Message,
    RebalanceExperts,
    Reply,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, earliest
from shm.broadcast import BroadcastReader, ReaderBells
from workers.engine.step_trace import StepTrace
from workers.loading import WeightLoader, tell_progress
from workers.rank_group.balancer import Balancer, FixedPlacement
from workers.rank_group.membership import RankGroupMember
from workers.rank_group.shared_step_queue import SharedStepQueue
from workers.step_loops import OwnStepLoop, SharedStepLoop, StepLoop
from workers.step_runs import StepRuns
from workers.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from workers.extensions.adapters.loading import AdapterLoader

_LOOK_NS = 2_000_000  # a compiled grammar does not wake the loop


class WorkerActor(Actor):
    """One rank of the engine."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._to_scheduler = BackloggedOutbox(context.outbox(context.scheduler).send_bytes)
        self._trace = StepTrace(context.tracer)
        self._metrics = WorkerMetrics(context)
        self._adapters: AdapterLoader | None = None
        self._balancer: Balancer | FixedPlacement = FixedPlacement()

    # ---------------------------------------------------------------------------------------------------------- life

    def on_start(self) -> None:
        config = self.context.config
        tell_progress(self.context, "starting" if config.ops in ("native", "cuda") else "starting Paddle")
        from workers.extensions.adapters.loading import AdapterLoader
        from workers.extensions.grammars.grammars import Grammars
        from workers.rank import make_rank

        self._rank = make_rank(self.context, self._beat)
        self._runner, self._group = self._rank.runner, self._rank.group
        self._grammars = self._runner.core.find(Grammars)
        self._runner.core.model_step.replay = self._trace.replay
        can = self._runner.core.device.capabilities
        self.context.log.info("device %s", can.text)
        self._metrics.show_device(self._runner.core)
        self._arena_id = 0 if can.is_arena_lasting else self.context.epoch
        if self._rank.adapters is not None:
            self._adapters = AdapterLoader(self._rank.adapters)
        self._weights = WeightLoader(self.context, self._runner, self._metrics)
        self._weights.load_in_use(only_exact=config.enable_expert_parallel and config.data_parallel_size > 1)
        self._reader = BroadcastReader.attach(
            self.context.run.run_id, self.context.scheduler, self.context.tensor_rank, self.context.epoch
        )
        self._runs = StepRuns(self._runner, self._group, self.context.tensor_rank, self._metrics, self._trace, self._send)
        self._loop = self._make_loop()
        self.send_hello()

    def on_stop(self) -> None:
        self._loop.close()
        self._reader.leave()
        self._reader.close()

    def on_command(self, command: Command) -> Reply | None:
        if isinstance(command.order, LoadAdapter) and self._adapters is not None:
            return self._adapters.start(command.command_id, command.order)
        if isinstance(command.order, RebalanceExperts) and isinstance(self._balancer, Balancer):
            self._balancer.rebalance(command.command_id, is_forced=command.order.force)
            return None
        return super().on_command(command)

    def on_peer(self, name: str, epoch: int) -> None:
        if name == self.context.scheduler:
            self._runs.drop_all()
            self._to_scheduler.clear()  # meant for the scheduler that died
            self.send_hello()

    def do_work(self) -> int:
        if self._group.has_new_epoch:
            self.send_hello()
        num_done = self._to_scheduler.flush()
        if self._adapters is not None and (reply := self._adapters.take_reply()) is not None:
            self.context.events.send(reply)
        for number in self._grammars.threads.take_compiled() if self._grammars else ():
            self._send(GrammarCompiled(number, self.context.tensor_rank))
            num_done += 1
        return num_done + self._loop.do_work()

    def wait(self, timeout_ns: int) -> None:
        """Wait on the doorbell of the broadcast ring; the loop checks the control ring at least every 100 ms."""
        self._loop.wait(timeout_ns)

    def deadline_ns(self) -> int:
        look_ns = time.monotonic_ns() + _LOOK_NS if self._grammars and self._grammars.threads.num_compiling else 0
        return earliest(look_ns, self._to_scheduler.deadline_ns())

    # ---------------------------------------------------------------------------------------------------------- work

    def carry_out(self, message: Message) -> None:
        """Handle a message of the broadcast ring that is not a Step, after all earlier steps."""
        if not isinstance(message, CompileGrammar):  # a grammar does not affect running steps
            self._runs.finish_all()
        match message:
            case CompileGrammar():
                assert self._grammars is not None, "a pooling engine has no grammars"
                self._grammars.threads.compile(message.number, message.text)
            case LoadWeights():
                if not message.ranks or self.context.tensor_rank in message.ranks:
                    self._send(self._weights.change(message))
            case ClearWeights():
                self._send(self._weights.clear(message.command_id))
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} on the broadcast ring")

    def send_hello(self) -> None:
        """Join the rank group's epoch and send a Hello in it, once this rank is a member if it will be one."""
        says_hello = self._loop.join()
        self._metrics.rank_group_epoch.set(self._group.epoch)
        if not says_hello:
            return
        context, weights = self.context, self._runner.core.weights
        of_weights = weights.version, weights.path, weights.contents
        self._send(Hello(context.name, context.epoch, *of_weights, self._group.epoch, self._arena_id))

    def _make_loop(self) -> StepLoop:
        experts = self._group.experts
        if experts is None or not isinstance(self._group, RankGroupMember):
            return OwnStepLoop(self.context, self._reader, self._runs, self._group, self)
        self._balancer = self._make_balancer(self._group)
        size, run_id = self.context.config.tensor_parallel_size, self.context.run.run_id
        bells = [ReaderBells(run_id, scheduler, range(size)) for scheduler in self.context.schedulers]
        queue = SharedStepQueue(experts, self._group.communicator, self._reader, bells, self._beat, self._balancer)
        return SharedStepLoop(self.context, queue, self._runs, self._group, self._metrics, self)

    def _make_balancer(self, group: RankGroupMember) -> Balancer | FixedPlacement:
        topology = group.topology(self._rank.model)
        if topology is None or group.experts is None:
            return FixedPlacement()
        core, config = self._runner.core, self.context.config.eplb_config
        return Balancer(
            group.experts,
            group.board,
            config,
            topology,
            lambda: core.weights.mixtures,
            self._rebalanced,
            self.context.events.send,
        )

    def _rebalanced(self, num_moved: int, imbalance: float) -> None:
        self._metrics.rebalanced(num_moved, imbalance)
        self.context.log.debug("moving %d experts; max/mean of the ranks' rows becomes %.3f", num_moved, imbalance)

    def _beat(self) -> None:
        """Update the heartbeat between two ops of a step, which may take long."""
        self.context.row.beat(time.monotonic_ns())

    def _send(self, message: Message) -> None:
        self._to_scheduler.post(message)
        self._to_scheduler.flush()
