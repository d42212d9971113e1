"""The scheduler: decides what the ranks compute next, and tells the tokenizers what came of it.

One process. It owns every queue, batch slot and block table; a rank holds nothing that cannot be made again from what is
here. Read `SchedulerActor.step` first. The parts, one noun each:

    intake.py     Request -> Sample, or 400 / 429         policy.py     what runs in the next step: pure decisions
    sequence.py   a Sample: its tokens and what it holds  dispatch.py   Steps to the ranks, steps in flight
    queues.py     samples in their order                  results.py    what came of a step
    roster.py     all samples, slots, the block pool      delivery.py   outputs to the tokenizers
    blocks.py     the pool and its prefix index           kv_events.py  changes of the index, to the cache messenger
    aborts.py     samples that end early                  commands.py   operators' orders
    ranks.py      which ranks are there                   weights.py    the state machine of the weights
    meter.py      what is counted

    tokenizers --Request, Abort--> intake -> waiting -> running --Step--> ranks --StepResult--> results --Outputs--> tokenizers
"""

from __future__ import annotations

import time

from engine.errors import RequestError, StartError
from engine.messages import (
    Abort,
    BlocksMoved,
    Command,
    Hello,
    Message,
    Rejected,
    Reply,
    Request,
    StepResult,
    WeightsChanged,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.topology import CACHE, SCHEDULER, index_of, role_of
from engine.scheduler.aborts import Aborts
from engine.scheduler.admission import Intake
from engine.scheduler.batch_state import Roster
from engine.scheduler.block_events import BlockEvents
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.delivery import RETRY_INTERVAL_NS, Delivery
from engine.scheduler.dispatch import Dispatcher
from engine.scheduler.policy import Limits, choose
from engine.scheduler.ranks import Ranks
from engine.scheduler.results import Results, ending_output, finish_reason_of
from engine.scheduler.sequence import start_bytes
from engine.scheduler.stats import Meter
from engine.scheduler.weight_state import Weights
from engine.scheduler.weight_updates import Commands
from shm.broadcast import BroadcastWriter

STEP_BYTES = 256  # of a Step besides its starts, and what each row adds
STEP_BYTES_PER_ROW = 64
RESULT_BYTES = 256  # of a StepResult besides log-probabilities of prompts, and what each row adds
RESULT_BYTES_PER_ROW = 224
MIN_RESULT_BYTES = 256  # one token's


class SchedulerActor(Actor):
    """Glue: messages in, the loop, gauges. Decisions are in the parts."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        config = context.config
        writer = BroadcastWriter.attach(context.run.run_id, SCHEDULER, context.epoch)
        self.limits = Limits(
            max_tokens=config.max_num_batched_tokens,
            max_running=config.max_num_seqs,
            max_start_bytes=writer.max_record_bytes - STEP_BYTES - STEP_BYTES_PER_ROW * config.max_num_seqs,
            max_result_bytes=max(
                MIN_RESULT_BYTES,
                context.mailbox.max_record_bytes - RESULT_BYTES - RESULT_BYTES_PER_ROW * config.max_num_seqs,
            ),
            block_size=config.block_size,
            has_prefix_cache=config.enable_prefix_caching,
        )
        pool = BlockPool(config.num_kv_blocks)
        self.block_events = BlockEvents(context.outbox(CACHE), pool, config.block_size)
        self.roster = Roster(self.limits, pool, self.block_events.stored)
        self.intake = Intake(config, self.limits)
        self.delivery = Delivery(context)
        self.dispatcher = Dispatcher(writer, context.epoch)
        self.results = Results(context, self.roster)
        self.aborts = Aborts(context, self.roster)
        self.weights = Weights(*context.weights_in_use())
        self.ranks = Ranks(config.num_ranks, self.weights.path, self.weights.version)
        self.commands = Commands(
            context, self.weights, self.roster, self.dispatcher, self.ranks, self.aborts, self.block_events
        )
        self.meter = Meter(context, self.roster, self.weights)
        self._preemptions = context.counter("num_preemptions_total")
        self._rejections = context.counter("requests_rejected_total")
        self._dropped = context.counter("messages_dropped_total")
        self._dispatched_again = context.counter("steps_dispatched_again_total")

    def on_start(self) -> None:
        longest = start_bytes(self.intake.max_positions)
        if longest > self.limits.max_start_bytes:
            raise StartError(
                f"the broadcast ring takes starts of {self.limits.max_start_bytes} bytes, the longest request needs {longest}; "
                "lower --max-model-len"
            )
        self.weights.go_on(self.meter.last_state)
        self.meter.show()

    def step(self) -> int:
        """One turn: orders and deadlines, then steps while there is room for one, then whatever can be sent."""
        num_done = self.aborts.expire(time.monotonic_ns()) + self.commands.advance() + self.dispatcher.flush()
        while self.commands.can_dispatch and self.ranks.are_complete and self.dispatcher.has_room and self._dispatch():
            num_done += 1
        num_done += self.delivery.flush() + self.block_events.flush()
        self.meter.show()
        return num_done

    def deadline_ns(self) -> int:
        deadline_ns = self.aborts.next_deadline_ns
        if self.delivery.has_slow_streams or self.dispatcher.has_unsent:
            retry_ns = time.monotonic_ns() + RETRY_INTERVAL_NS
            return min(deadline_ns, retry_ns) if deadline_ns else retry_ns
        return deadline_ns

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case StepResult():
                self._on_result(message)
            case Request():
                self._on_request(message)
            case Abort():
                self._on_abort(message)
            case Hello():
                self._on_hello(sender, message)
            case WeightsChanged():
                self.commands.rank_answered(message)
            case BlocksMoved():
                self._dropped.add(1)  # no tiers yet, so nothing was asked for
            case _:
                raise AssertionError(f"{type(message).__name__} from {sender} has no business here")

    def on_command(self, command: Command) -> Reply | None:
        return self.commands.take(command)

    def on_peer(self, name: str, epoch: int) -> None:
        match role_of(name):
            case "api":
                self.aborts.drop_api(name, epoch)
            case "tokenizer":
                self.aborts.drop_tokenizer(name, epoch)
            case "worker":
                self.ranks.restarted(index_of(name), epoch)

    def _dispatch(self) -> bool:
        """Choose and send the next step. False where there is nothing to do now."""
        begin_ns = time.monotonic_ns()
        roster = self.roster
        plan = choose(roster.running, roster.waiting, roster.leaders, roster.pool, self.limits, roster.num_leaving)
        if plan.preempted is not None:
            roster.preempt(plan.preempted)
            self._preemptions.add(1)
        if plan.admitted:
            roster.admit(plan.admitted)
            for admission in plan.admitted:
                self.meter.admitted(admission.sample, begin_ns)
        if plan.rows:
            flight = self.dispatcher.dispatch(plan.rows, roster, time.monotonic_ns())
            self.meter.dispatched(flight.num_tokens, time.monotonic_ns() - begin_ns)
        return bool(plan.rows) or plan.preempted is not None

    def _on_result(self, result: StepResult) -> None:
        step = self.dispatcher.take(result.step_id) if result.rank == 0 else None
        if step is None:
            self._dropped.add(1)
            return
        now_ns = time.monotonic_ns()
        self.results.apply(step, result, now_ns)
        self.meter.returned(result, time.monotonic_ns())

    def _on_request(self, request: Request) -> None:
        known = self.roster.samples.get(request.request_id)
        is_stale = known is not None and known.request.attempt >= request.attempt
        if is_stale or request.api_epoch < self.context.peer_epoch(request.api):
            self._dropped.add(1)
            return
        if known is not None:
            self.roster.finish(known)
        stream = self.delivery.stream(request.tokenizer)
        num_waiting = 0 if request.attempt else self.roster.num_waiting  # what was begun is not refused any more
        try:
            sample = self.intake.take(request, stream, num_waiting, self.context.peer_epoch(request.tokenizer))
        except RequestError as error:
            self._rejections.add(1)
            stream.reject(rejection(request, error))
            return
        finish_reason = finish_reason_of(sample)
        if finish_reason:  # its last token was delivered, its end was not
            stream.add(ending_output(sample, finish_reason))
            return
        self.roster.add(sample, is_newcomer=known is None)
        self.aborts.watch(sample)

    def _on_abort(self, abort: Abort) -> None:
        sample = self.roster.samples.get(abort.request_id)
        if sample is None or sample.request.attempt > abort.attempt:
            return
        if abort.reason == "stop":  # the tokenizer found a stop string: the sample is complete
            self.results.end(sample, time.monotonic_ns())
        else:
            self.aborts.drop(sample)

    def _on_hello(self, sender: str, hello: Hello) -> None:
        if sender == CACHE:
            self.block_events.draw_anew()
        elif hello.epoch >= self.context.peer_epoch(sender) and self.ranks.greet(index_of(sender), hello):
            self._dispatched_again.add(self.dispatcher.give_up_flight())
            self.roster.forget_flight()
            self.commands.rank_came_back(index_of(sender))


def rejection(request: Request, error: RequestError) -> Rejected:
    """What the user hears of a request that does not run."""
    return Rejected(
        request.request_id,
        request.attempt,
        request.api,
        error.status,
        error.message,
        error.code,
        error.param,
        error.retry_after_s,
    )
