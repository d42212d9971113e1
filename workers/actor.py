"""The worker actor: one rank. Takes Steps from the scheduler's broadcast ring, runs them, sends the results back.

Run by `engine.process.main` as `worker<rank>`. Owns the rank's weights, slots and plan; the KV arena that it maps outlives it.
Its life: load the weights (LOADING, with progress), join the broadcast ring at its tail, say Hello to the scheduler, then one
record a turn, so that the control ring and SIGTERM are seen between two steps. What the scheduler's ring has no room for waits
here, in order.

Imports the runner late: what it needs (Paddle, with reference ops) takes a while, and the actor says so meanwhile.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError, ContentsError, sayable
from engine.messages import (
    ActorState,
    ClearWeights,
    Command,
    CompileGrammar,
    GrammarCompiled,
    Hello,
    LoadAdapter,
    LoadWeights,
    Membership,
    Message,
    RebalanceExperts,
    Reply,
    Step,
    StepResult,
    WeightsChanged,
    decode,
)
from engine.parallel.eplb import Topology
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.nodes import seat_of
from engine.process.outbox import BackloggedOutbox, earliest
from shm.broadcast import BroadcastReader, ReaderBells
from shm.counters import State
from shm.experts import ExpertTable
from workers.engine.step_trace import StepTrace
from workers.rank_group.balance_board import BalanceBoard
from workers.rank_group.balancer import Balancer
from workers.rank_group.communicator import SPIN_NS, Communicator, RankGroupBroken
from workers.rank_group.experts import ExpertRank
from workers.rank_group.shared_steps import RankGroupTurns
from workers.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from workers.extensions.adapters.arena import AdapterArena
    from workers.extensions.adapters.loading import AdapterLoading
    from workers.runners.runner import Runner

_PROGRESS_PARTS = 20
_MIB = 1 << 20
_LOOK_NS = 2_000_000  # until a grammar is compiled nobody wakes the loop
_HANG_GRACE_S = 10.0  # a peer that hangs is ended before who waits for it gives up


class WorkerActor(Actor):
    """One rank of the engine."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._to_scheduler = BackloggedOutbox(context.outbox(context.scheduler).send_bytes)
        self._last_end_ns = 0
        self._trace = StepTrace(context.tracer)
        self._started: deque[tuple[Step, int]] = deque()  # steps, and when they came
        self._takes_part = True  # in its rank group
        self._adapters: AdapterArena | None = None
        self._loading: AdapterLoading | None = None
        self._figures = WorkerMetrics(context)

    # ---------------------------------------------------------------------------------------------------------- life

    def on_start(self) -> None:
        config = self.context.config
        self._tell_progress("starting" if config.ops == "native" else "starting Paddle")
        self._runner = self._make_runner()
        self._runner.core.trace = self._trace
        can = self._runner.core.device.capabilities
        self.context.log.info("device %s", can.text)
        self._figures.show_device(self._runner.core)
        self._arena_id = 0 if can.is_arena_lasting else self.context.epoch
        self._load_what_there_is()
        self._reader = BroadcastReader.attach(
            self.context.run.run_id, self.context.scheduler, self.context.tensor_rank, self.context.epoch
        )
        self._turns = self._make_turns()
        self._tell_membership()
        self._send_hello()

    def on_stop(self) -> None:
        if self._turns is not None:
            self._turns.close()
        self._reader.leave()
        self._reader.close()

    def on_command(self, command: Command) -> Reply | None:
        if isinstance(command.order, LoadAdapter) and self._adapters is not None:
            return self._load_adapter(command.command_id, command.order, self._adapters)
        if not isinstance(command.order, RebalanceExperts) or self._balancer is None:
            return super().on_command(command)
        self._balancer.order(command.command_id, is_forced=command.order.force)
        return None

    def on_peer(self, name: str, epoch: int) -> None:
        if name == self.context.scheduler:
            while self._started:
                self._result()
            self._to_scheduler.clear()  # meant for the one before
            self._send_hello()

    def do_work(self) -> int:
        if self._communicator is not None and self._communicator.is_elsewhere:
            self._send_hello()
        num_done = self._to_scheduler.flush()
        if self._loading is not None and self._loading.reply is not None:
            self.context.events.send(self._loading.reply)
            self._loading = None
        for number in self._runner.core.constraints.take_compiled():
            self._send(GrammarCompiled(number, self.context.tensor_rank))
            num_done += 1
        if self._turns is not None:
            return num_done if self._turns.can_sleep_on else num_done + self._turn(self._turns)
        num_taken = 0
        for payload in self._reader.receive(max_records=1):
            self._take(decode(payload), time.monotonic_ns())
            num_taken += 1
        if self._started and not num_taken:  # nothing to start before the first one's result
            self._finish()
            num_taken += 1
        return num_done + num_taken

    def wait(self, timeout_ns: int) -> None:
        """The doorbell is the broadcast ring's; the loop looks at the control ring at least every 100 ms."""
        (self._turns or self._reader).wait(timeout_ns)

    def deadline_ns(self) -> int:
        look_ns = time.monotonic_ns() + _LOOK_NS if self._runner.core.constraints.num_compiling else 0
        return earliest(look_ns, self._to_scheduler.deadline_ns())

    # ---------------------------------------------------------------------------------------------------------- work

    def _take(self, message: Message, received_ns: int) -> None:
        if not isinstance(message, Step | CompileGrammar):
            self._finish_all()
        match message:
            case CompileGrammar():
                self._runner.core.constraints.compile(message.number, message.text)
            case Step():
                self._take_step(message, received_ns)
            case LoadWeights():
                if not message.ranks or self.context.tensor_rank in message.ranks:
                    self._send(self._change_weights(message))
            case ClearWeights():
                self._runner.clear()
                self._figures.show_weights(self._runner.core)
                self._send(self._weights_changed(message.command_id))
            case _:
                raise AssertionError(f"{type(message).__name__} has no business on the broadcast ring")

    def _take_step(self, step: Step, received_ns: int) -> None:
        """One of several ranks leaves alone what was meant for another epoch of its rank group, and drops a step where the
        rank group breaks: the scheduler sends it again when all have greeted. The first one answers for all."""
        if not self._runner.core.weights.version:
            self._send(self._refusal(step))
        elif self._communicator is None:
            self._start(step, received_ns)
            while len(self._started) >= self._runner.depth:
                self._finish()
        elif step.rank_group_epoch == self._communicator.epoch:
            try:
                result = self._run(step, received_ns)
                if self.context.tensor_rank == 0:
                    self._send(result)
                self._draft()
            except RankGroupBroken as broken:
                self.context.log.info("step %d is dropped: %s", step.step_id, broken.args[0])
                self._send_hello()

    def _turn(self, turns: RankGroupTurns) -> int:
        """One step of the rank group, with this replica's next Step or without rows, or an order; how many things were done."""
        received_ns = time.monotonic_ns()
        num_done = turns.receive()
        for message in turns.take_grammars():
            self._take(message, received_ns)
        order = turns.next_order()
        if order is not None:
            self._take(order, received_ns)
            self._tell_membership()
            return num_done + 1
        if not turns.has_turn(self._runner.core.weights.version > 0):
            return num_done
        try:
            step = turns.begin_turn(self._runner.core.weights.version)
            if step is None:
                self._runner.core.run_without_rows()
                self._runner.core.weights.check()
                self._figures.ended_without_rows(time.monotonic_ns() - received_ns, self._communicators)
            else:
                result = self._run(step, received_ns)
        except RankGroupBroken as broken:
            self.context.log.info("a step of the rank group is dropped: %s", broken.args[0])
            self._send_hello()
            return num_done + 1
        turns.end_turn()
        if step is None:
            self._figures.empty_rank_group_steps.add(1)
        self._figures.rank_group_steps.add(1)
        if step is not None and self.context.tensor_rank == 0:
            self._send(result)
        try:
            self._draft()
        except RankGroupBroken as broken:
            self.context.log.info("drafts are dropped: %s", broken.args[0])
            self._send_hello()
        return num_done + 1

    def _start(self, step: Step, received_ns: int) -> None:
        self._figures.began(step.step_id)
        begin_ns = time.monotonic_ns()
        self._runner.start(step)
        if self._trace.is_on:
            self._trace.began(step, begin_ns)
        self._started.append((step, received_ns))

    def _finish(self) -> None:
        """Send the result of the first step that was started."""
        self._send(self._result())
        self._draft()

    def _finish_all(self) -> None:
        while self._started:
            self._finish()

    def _run(self, step: Step, received_ns: int) -> StepResult:
        self._start(step, received_ns)
        return self._result()

    def _result(self) -> StepResult:
        step, received_ns = self._started.popleft()
        begin_ns = time.monotonic_ns()
        result = self._runner.finish()
        self._runner.core.weights.check()  # else what was computed is not sent
        if self._trace.is_on:
            self._trace.ended(step, received_ns, begin_ns, is_alone=self._runner.depth == 1)
        result.received_ns = received_ns
        end_ns = time.monotonic_ns()
        if self._last_end_ns and _continues(step):
            result.idle_ns = received_ns - self._last_end_ns
        self._last_end_ns = end_ns
        self._figures.ended(self._runner.core, result, end_ns - received_ns, self._communicators)
        return result

    def _draft(self) -> None:
        """Guess what comes next."""
        drafting = self._runner.core.drafting
        begin_ns = time.monotonic_ns()
        draft_ns = self._runner.core.draft()
        if drafting is None or not draft_ns:
            return
        self._figures.drafted(draft_ns)
        if drafting.has_passed:
            return
        if self._trace.is_on:
            self._trace.tracer.span("draft", begin_ns)
        self._figures.take_drafts(drafting, is_first=self.context.tensor_rank == 0)

    def _refusal(self, step: Step) -> StepResult:
        """The answer to a step after ClearWeights: the order of a scheduler that died may lie before a step of the next."""
        error = f"step {step.step_id} came while the weights are cleared"
        return StepResult(step.step_id, self.context.tensor_rank, 0, b"", b"", b"", error=error)

    def _change_weights(self, message: LoadWeights) -> WeightsChanged:
        before = self.context.row.state
        self.context.row.set_state(State.LOADING)
        error_text = ""
        try:
            self._load(message.path, message.version, message.contents)
        except Exception as error:  # whatever is wrong with them, the present ones serve on
            is_known = isinstance(error, CheckpointError)
            error_text = str(error) if is_known else sayable(f"{message.path} cannot be loaded: {error!r}")
            self.context.log.error("weights %s were not loaded: %s", message.path, error_text)
        self.context.row.set_state(before)
        return self._weights_changed(message.command_id, error_text)

    def _weights_changed(self, command_id: str, error: str = "") -> WeightsChanged:
        weights = self._runner.core.weights
        return WeightsChanged(command_id, self.context.tensor_rank, weights.version, weights.path, error, weights.contents)

    # ------------------------------------------------------------------------------------------------------- loading

    def _make_runner(self) -> Runner:
        config = self.context.config
        from ops.cpu.progress import report_progress_to
        from workers.extensions.media.features import Features
        from workers.rank_group.peers import Peers
        from workers.runners.runner import make_runner

        self.context.row.beat(time.monotonic_ns())
        self._arena = self.context.arena()
        report_progress_to(self.context.row.heartbeat_word)
        if config.ops != "native":
            from ops.paddle import progress

            progress.report_progress_to(self._beat)
        model = ModelRecord.of_run(self.context.run.model_path).config
        self._communicator = self._make_communicator()
        self._communicators = [self._communicator] if self._communicator else []
        self._experts: ExpertRank | None = None
        self._balancer: Balancer | None = None
        if config.enable_expert_parallel:
            self._experts = ExpertRank(self._communicator_of(0, config.num_ranks, shares_experts=True), config, model)
            self._communicators.append(self._experts.communicator)
            board = BalanceBoard(ExpertTable.attach(self.context.run.run_id), self.context.index)
            self._experts.counts = board.counts[self.context.index]
            self._balancer = self._make_balancer(self._experts, board, model)
        features = Features(self.context.encoder_arena(), self.context.pixel_slab) if config.encoder_cache_size else None
        peers = Peers(config, self.context.index, self._communicator, self._experts, self.context.epoch)
        self._adapters = self._make_adapters(model)
        card = self.context.device_arena_fd
        return make_runner(config, model, self._arena.buffer, peers, self._beat, features, self._adapters, device_arena=card)

    def _make_adapters(self, model: ModelConfig) -> AdapterArena | None:
        """Those that are there already, too; None: the engine takes none."""
        self._adapter_memory = self.context.adapter_arena()
        if self._adapter_memory is None:
            return None
        from engine.checkpoint.adapters.layout import AdapterLayout
        from workers.extensions.adapters.arena import AdapterArena

        config = self.context.config
        layout = AdapterLayout.of(model, config.max_loras, config.max_lora_rank)
        return AdapterArena(self._adapter_memory.buffer, layout)

    def _load_adapter(self, command_id: str, order: LoadAdapter, arena: AdapterArena) -> Reply | None:
        """In a thread, whose answer `step` sends."""
        from workers.extensions.adapters.loading import AdapterLoading

        if self._loading is not None:
            return Reply(command_id, 409, "another adapter is being loaded; ask again when that is done")
        self._loading = AdapterLoading(command_id, order, arena)
        return None

    def _make_communicator(self) -> Communicator | None:
        """With the ranks of its replica; None: the rank has no peers."""
        self._comm_arena = self.context.comm_arena()
        if self._comm_arena is None:
            return None
        size = self.context.config.tensor_parallel_size
        return self._communicator_of(self._rank_in_rank_group - self.context.tensor_rank, size)

    @property
    def _rank_in_rank_group(self) -> int:
        """A rank group is a replica, or all of them where they share the experts."""
        return self.context.index if self.context.config.enable_expert_parallel else self.context.tensor_rank

    def _communicator_of(self, first: int, count: int, *, shares_experts: bool = False) -> Communicator:
        assert self._comm_arena is not None
        config = self.context.config
        num_beside = seat_of(self.context.index, config.num_ranks, config.memory_nodes or [()]).count
        has_own_cores = num_beside * config.threads <= len(os.sched_getaffinity(0))
        return Communicator(
            self._comm_arena.buffer,
            self._rank_in_rank_group,
            first,
            count,
            timeout_s=config.hang_timeout_s + _HANG_GRACE_S,
            spin_ns=SPIN_NS if has_own_cores else 0,
            shares_experts=shares_experts,
            needs_all=config.are_rank_groups_whole,
        )

    def _make_turns(self) -> RankGroupTurns | None:
        """None: the rank runs a Step as soon as it comes."""
        if self._experts is None or self._communicator is None:
            return None
        size, run_id = self.context.config.tensor_parallel_size, self.context.run.run_id
        bells = [ReaderBells(run_id, scheduler, range(size)) for scheduler in self.context.schedulers]
        return RankGroupTurns(self._experts, self._communicator, self._reader, bells, self._beat, self._balancer)

    def _make_balancer(self, experts: ExpertRank, board: BalanceBoard, model: ModelConfig) -> Balancer | None:
        """None: experts stay where they are at first."""
        config = self.context.config
        if not config.enable_eplb or model.experts is None:
            return None
        topology = Topology(config.num_ranks, experts.num_slots, num_groups=model.experts.num_groups)
        return Balancer(
            experts,
            board,
            config.eplb_config,
            topology,
            lambda: self._runner.core.mixtures,
            self._tell_rebalance,
            self.context.events.send,
        )

    def _tell_rebalance(self, num_moved: int, imbalance: float) -> None:
        self._figures.rebalanced(num_moved, imbalance)
        self.context.log.debug("%d experts move; max/mean of the ranks' rows becomes %.3f", num_moved, imbalance)

    def _load_what_there_is(self) -> None:
        """What is in use. Where that cannot be had any more, what its checkpoint holds now, else none, never other weights: by
        version and contents the scheduler sees that this is not what is in use. CheckpointError at a first start."""
        path, version, contents = self.context.weights_in_use()
        try:
            try:
                self._load(path, version, contents)
            except ContentsError as error:
                if self._experts is not None and self.context.config.data_parallel_size > 1:
                    raise  # under the same number it would compute other replicas' rows with other weights
                self._tell_lost(path, error)
                self._load(path, version)
        except CheckpointError as error:
            if self.context.epoch == 1:
                raise
            self._tell_lost(path, error)

    def _tell_lost(self, path: str, error: CheckpointError) -> None:
        self.context.log.error("weights %s cannot be loaded again: %s", path, error)
        self.context.counters.errors.record(self.context.name, str(error))

    def _load(self, path: str, version: int, contents: str = "") -> None:
        """Load weights, those of these contents where some are named; CheckpointError leaves the present ones."""
        begin_ns = time.monotonic_ns()
        shown_part = -1

        def on_progress(num_done: int, num_bytes: int) -> None:
            nonlocal shown_part
            self.context.row.beat(time.monotonic_ns())
            part = num_done * _PROGRESS_PARTS // max(num_bytes, 1)
            if part != shown_part:
                shown_part = part
                bar = "#" * part + "." * (_PROGRESS_PARTS - part)
                self._tell_progress(f"weights [{bar}] {num_done / _MIB:.0f} of {num_bytes / _MIB:.0f} MiB")

        self._runner.load(path, version, on_progress, contents)
        self._figures.loaded(self._runner.core, time.monotonic_ns() - begin_ns)

    def _beat(self) -> None:
        """Between two ops of a step: it may take long, but it gets on."""
        self.context.row.beat(time.monotonic_ns())

    def _tell_progress(self, text: str) -> None:
        """The supervisor shows it on the terminal, beside this actor."""
        self.context.row.beat(time.monotonic_ns())
        self.context.events.send(ActorState(self.context.name, self.context.epoch, State.LOADING.name, text))

    # ------------------------------------------------------------------------------------------------------- sending

    def _tell_membership(self) -> None:
        """A rank that shares experts takes part while it has weights. Else its peers would wait for it, for as long as it has
        none; so they compute its experts."""
        has_weights = self._runner.core.weights.version > 0
        if self._turns is not None and has_weights != self._takes_part:
            self._takes_part = has_weights
            self.context.events.send(Membership(self.context.name, self.context.epoch, has_weights))

    def _send_hello(self) -> None:
        """Say Hello; one of several ranks in the epoch that its rank group has now, and not before it is a member, if it is to
        be."""
        weights, rank_group_epoch = self._runner.core.weights, 0
        if self._communicator is not None:
            is_member = self._communicator.join()
            if self._turns is not None:
                self._turns.join()
            rank_group_epoch = self._communicator.epoch
            self._figures.rank_group_epoch.set(rank_group_epoch)
            if not is_member and self._takes_part:
                return
        self._send(
            Hello(
                self.context.name,
                self.context.epoch,
                weights.version,
                weights.path,
                weights.contents,
                rank_group_epoch,
                self._arena_id,
            )
        )

    def _send(self, message: Message) -> None:
        self._to_scheduler.post(message)
        self._to_scheduler.flush()


def _continues(step: Step) -> bool:
    """Whether the step has a row of a sequence that ran before. If so the rank's idle time before it was lost to that sequence;
    else there was nothing to do."""
    started = {start.slot for start in step.starts}
    return any(slot not in started for slot in np.frombuffer(step.slots, np.int32).tolist())
