"""The scheduler: decides what the ranks compute next, and sends the results to the tokenizers.

One process. It owns every queue, batch slot and block table; everything that a rank holds can be restored from here. Read
`SchedulerActor.do_work` first. The parts, one noun each:

    admission.py     Request -> Sequence, or 400 / 429      policy.py          pure decisions on the next step
    sequence.py      its tokens and resources               dispatch.py        Steps to the ranks, steps in flight
    intake.py        held new requests (shared experts)     results.py         results of steps
    step_cost.py     time of a step                         prefill_shares.py  shares of the prompts of a step
    queues.py        sequences in their order               fair_share.py      fair turns between sources
    batch_state.py   all sequences, slots, the block pool   delivery.py        outputs to the tokenizers
    block_pool.py    blocks, with prefix_cache.py           block_events.py    changes of the index, to the cache actor
    states.py        states of recurrent layers
    aborts.py        sequences that end early               commands.py        operators' commands
    ranks.py         ranks that are present                 weight_state.py    the state machine of the weights
    stats.py         metrics                                weight_updates.py  commands about the weights
    encoder_cache.py features of media                      encoder_work.py    the next work of the encoder
    grammars.py      grammars that the ranks have compiled

    tokenizers --Request, Abort--> admission, waiting, running --Step--> ranks --StepResult--> results --Outputs--> tokenizers
"""

from __future__ import annotations

import time

from engine.config import EngineConfig
from engine.errors import RequestError, StartError
from engine.messages import (
    Abort,
    BlocksMoved,
    Command,
    GrammarCompiled,
    Hello,
    Message,
    Pixels,
    PixelsFailed,
    Reply,
    Request,
    SequenceRequest,
    StepResult,
    WeightsChanged,
)
from engine.process.actor import Actor
from engine.process.adapters import AdapterRegistry
from engine.process.context import ActorContext
from engine.process.outbox import earliest
from engine.process.topology import role_of
from engine.scheduler.aborts import Aborts
from engine.scheduler.admission import AdmissionControl
from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_events import BlockEvents
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.commands import SchedulerCommands
from engine.scheduler.delivery import Delivery
from engine.scheduler.dispatch import Dispatcher
from engine.scheduler.encoder_work import CALL_BYTES, MAX_CALL_UNITS, RESULT_UNIT_BYTES, EncoderWork
from engine.scheduler.grammars import Grammars
from engine.scheduler.intake import Intake, StepKind
from engine.scheduler.limits import Limits
from engine.scheduler.policy import schedule
from engine.scheduler.ranks import Ranks
from engine.scheduler.results import Results, ending_output, finish_reason_of, rejection
from engine.scheduler.sequence import LOGPROB_BYTES, Sequence, start_bytes
from engine.scheduler.states import StatePool, StateRules
from engine.scheduler.stats import SchedulerStats
from engine.scheduler.step_cost import StepCost
from engine.scheduler.step_trace import trace_dispatch, trace_result
from engine.scheduler.weight_state import WeightState
from engine.scheduler.weight_updates import WeightUpdates
from shm.broadcast import BroadcastWriter

SLOT_PATIENCE_NS = 250_000_000  # how long a source without a running sequence waits before another gives up a slot
STEP_BYTES = 256  # of a Step besides its starts, and for each row
STEP_BYTES_PER_ROW = 64
GROWTH_BYTES = 16  # of a block that a sequence gets, in one table
ROW_BYTES = 12  # for a unit with rows that the ranks must know; a step reads at most as many as it has tokens
RESULT_BYTES = 256  # of a StepResult besides log-probabilities of prompts, and for each sampled token
RESULT_BYTES_PER_TOKEN = 64  # and for each of the best tokens
MIN_RESULT_BYTES = 256  # of one token


def result_bytes_per_token(config: EngineConfig) -> int:
    """Return the most bytes that a sampled token adds to a StepResult."""
    return RESULT_BYTES_PER_TOKEN + LOGPROB_BYTES * config.max_logprobs


class SchedulerActor(Actor):
    """Wires the parts together: messages, the loop, gauges. The parts make all decisions."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        config = context.config
        writer = BroadcastWriter.attach(context.run.run_id, context.name, context.epoch)
        has_encoder = config.encoder_cache_size > 0
        step_bytes = STEP_BYTES + STEP_BYTES_PER_ROW * config.max_num_seqs
        num_tables = sum(group.num_tables for group in config.kv_groups)
        if num_tables > 1 or config.kv_groups[0].window:  # prompts get blocks chunk by chunk
            num_blocks = config.max_num_batched_tokens // config.block_size + 2 * config.max_num_seqs
            step_bytes += GROWTH_BYTES * num_tables * num_blocks
        token_bytes = result_bytes_per_token(config)
        result_bytes = RESULT_BYTES + token_bytes * config.max_num_seqs
        if has_encoder:
            step_bytes += CALL_BYTES + ROW_BYTES * config.max_num_batched_tokens
            result_bytes += RESULT_UNIT_BYTES * MAX_CALL_UNITS
        max_drafts = min(config.max_num_seqs * config.speculative_config.max_drafts, config.max_num_batched_tokens)
        room = context.mailbox.max_record_bytes - result_bytes - MIN_RESULT_BYTES
        max_drafts = max(0, min(max_drafts, room // token_bytes))
        result_bytes += token_bytes * max_drafts
        self._result_bytes = result_bytes
        self._cost = StepCost(int(config.max_step_time_ms * 1e6))
        overlap, states, rules = config.speculative_config.num_overlap, None, None
        if config.num_states:
            rules = StateRules(config.block_size, config.state_cache_interval, overlap)
            states = StatePool(config.num_states, config.max_num_seqs, rules, self._cost.prompt_ns)
        self.limits = Limits(
            max_tokens=config.max_num_batched_tokens,
            max_running=config.max_num_seqs,
            max_start_bytes=writer.max_record_bytes - step_bytes,
            max_result_bytes=max(MIN_RESULT_BYTES, context.mailbox.max_record_bytes - result_bytes),
            block_size=config.block_size,
            has_prefix_cache=config.enable_prefix_caching,
            are_prompts_whole=config.pooling is not None and config.pooling.is_whole,
            mm_chunk_tokens=config.mm_chunk_tokens,
            max_drafts=max_drafts,
            num_overlap=overlap,
            long_prefill_tokens=config.long_prefill_token_threshold,
            max_partial_prefills=config.max_num_partial_prefills,
            max_long_prefills=config.max_long_partial_prefills,
            groups=config.kv_groups,
            states=rules,
        )
        pool = BlockPool(config.num_kv_pages, config.kv_groups, states)
        self.block_events = BlockEvents(context.outbox(context.cache), pool, config.block_size)
        self.batch = BatchState(self.limits, pool, self.block_events.stored, config.speculative_config.max_drafts)
        self.admission = AdmissionControl(config, self.limits)
        self.delivery = Delivery(context)
        self.encoder = EncoderWork(context, self.batch) if has_encoder else None
        self._is_readable = bool if self.encoder is None else self.encoder.cache.is_readable
        self.dispatcher = Dispatcher(writer, context.epoch, self.encoder)
        self.grammars = Grammars(len(context.ranks), self.dispatcher.send, context.epoch)
        self.dispatcher.on_lost = self.grammars.ask_again
        self.results = Results(context, self.batch)
        self.aborts = Aborts(context, self.batch)
        self.weights = WeightState(context.run.weights(context.name))
        self.ranks = Ranks(len(context.ranks))
        self.stats = SchedulerStats(context, self.batch, self.weights)
        self.weight_updates = WeightUpdates(
            context,
            self.weights,
            self.batch,
            self.dispatcher,
            self.ranks,
            self.aborts,
            self.block_events,
            self.stats.show,
            self.encoder,
        )
        self.commands = SchedulerCommands(self.weights, self.ranks, self.aborts, self.weight_updates)
        self._adapters = AdapterRegistry(context) if config.max_loras else None
        self._held_until_ns = 0  # by the last plan; 0: not held
        self._passed_over: Sequence | None = None  # by the last plan
        self._kind = StepKind.DECODE if config.enable_expert_parallel and not config.ep_mixed_steps else StepKind.MIXED
        others = [name for name in context.schedulers if name != context.name and config.enable_expert_parallel]
        self._others_running = [context.counters.counter("num_requests_running", name) for name in others]
        self._preemptions = context.counter("num_preemptions_total")
        self._rejections = context.counter("requests_rejected_total")
        self._dropped = context.counter("messages_dropped_total")
        self._dispatched_again = context.counter("steps_dispatched_again_total")

    def on_start(self) -> None:
        longest = start_bytes(self.admission.max_positions, self.admission.num_table_bytes(self.admission.max_positions))
        if longest > self.limits.max_start_bytes:
            raise StartError(
                f"the longest request needs {longest} bytes in the broadcast ring, the limit is "
                f"{self.limits.max_start_bytes}; lower --max-model-len"
            )
        if self._result_bytes > self.context.mailbox.max_record_bytes:
            raise StartError(
                f"results of --max-num-seqs {self.context.config.max_num_seqs} with --max-logprobs "
                f"{self.context.config.max_logprobs} need up to {self._result_bytes} bytes, the limit of the ring is "
                f"{self.context.mailbox.max_record_bytes}; lower one of them"
            )
        pooled = self.admission.num_pooled_bytes
        if pooled > self.limits.max_result_bytes:
            raise StartError(
                f"the pooled output of a prompt needs {pooled} bytes, the limit of the worker's ring is "
                f"{self.limits.max_result_bytes}; lower --max-num-seqs"
            )
        self.stats.show()

    def do_work(self) -> int:
        """Do one turn: commands and deadlines, then steps while there is room, then send what can be sent."""
        num_done = self.aborts.expire(time.monotonic_ns()) + self.weight_updates.advance() + self.dispatcher.flush()
        if self.encoder is not None:
            num_done += self.encoder.advance(time.monotonic_ns())
        self._held_until_ns = 0  # if nothing can be dispatched, the event that changes this wakes the loop
        while self.weight_updates.can_dispatch and self.ranks.are_complete and self.dispatcher.has_room and self._dispatch():
            num_done += 1
        self.stats.show()  # before answers are sent: a client with an answer finds up-to-date gauges
        num_done += self.delivery.flush() + self.block_events.flush()
        self.stats.show_slow_streams()
        return num_done

    def deadline_ns(self) -> int:
        encoder_ns = 0 if self.encoder is None else self.encoder.deadline_ns
        deadlines = self.delivery.deadline_ns(), self.dispatcher.deadline_ns(), self._held_until_ns, encoder_ns
        return earliest(self.aborts.next_deadline_ns, *deadlines)

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case StepResult():
                self._on_result(message)
            case Request():
                for request in message.per_sequence():
                    self._on_request(request)
                self.stats.show_load()
            case Abort():
                self._on_abort(message)
            case Hello():
                self._on_hello(sender, message)
            case WeightsChanged():
                self.weight_updates.rank_answered(message)
            case GrammarCompiled():
                self.grammars.compiled(message.number, message.rank)
            case Pixels() | PixelsFailed():
                self._on_pixels(message)
            case BlocksMoved():
                self._dropped.add(1)  # there are no tiers yet, so no move was requested
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} from {sender}")

    def on_command(self, command: Command) -> Reply | None:
        return self.commands.handle(command)

    def on_peer(self, name: str, epoch: int) -> None:
        match role_of(name):
            case "api":
                self.aborts.drop_api(name, epoch)
            case "tokenizer" | "link":
                self.aborts.drop_tokenizer(name, epoch)
            case "media" if self.encoder is not None:
                self.encoder.media_restarted(name, epoch)
            case "worker":
                if name in self.context.ranks:
                    self.ranks.restarted(self.context.ranks.index(name), epoch)

    def _dispatch(self) -> bool:
        """Choose and send the next step. Return False if there is none to send now."""
        begin_ns = time.monotonic_ns()
        batch = self.batch
        parts = None if self.encoder is None else self.encoder.next_parts()
        self.grammars.look_ahead(batch.waiting)
        output = schedule(
            batch.running,
            batch.waiting,
            batch.leaders,
            batch.pool,
            self.limits,
            batch.num_leaving,
            self._is_readable,
            (self._kind,) if self._kind is StepKind.MIXED else (self._kind.next, self._kind),
            self._intake(begin_ns),
            self._cost,
            self._passed_over,
            begin_ns - SLOT_PATIENCE_NS,
        )
        self._passed_over = output.passed_over
        self._held_until_ns = output.held_until_ns
        if self.encoder is not None:
            self.encoder.needs.looked_for_rows(bool(output.rows), parts is not None or self.dispatcher.num_in_flight > 0)
        if output.preempted is not None:
            batch.preempt(output.preempted)
            self._preemptions.add(1)
        for sequence in output.trimmed:
            batch.trim(sequence)
        if output.admitted:
            batch.admit(output.admitted)
            for admission in output.admitted:
                if (
                    not admission.sequence.first_scheduled_ns
                ):  # the api process keeps the hits, should this process die before a token
                    admission.sequence.reader.add(ending_output(admission.sequence, ""))
                self.stats.admitted(admission.sequence, begin_ns)
        if output.rows:
            self._kind = output.kind
        if output.rows or parts is not None:
            flight = self.dispatcher.dispatch(output.rows, batch, time.monotonic_ns(), self.ranks.rank_group_epoch, parts)
            self._cost.dispatched(flight.load)
            self.stats.dispatched(flight.num_tokens, time.monotonic_ns() - begin_ns)
            if self.context.tracer.is_on:
                trace_dispatch(self.context.tracer, flight, output, begin_ns)
        return bool(output.rows or output.trimmed) or parts is not None or output.preempted is not None

    def _intake(self, now_ns: int) -> Intake | None:
        """Return None if no request waits, or none is held."""
        config, batch = self.context.config, self.batch
        if not config.enable_expert_parallel or not len(batch.waiting):
            return None
        is_idle = not len(batch.running) and not any(running.value for running in self._others_running)
        return Intake(config.ep_batched_token_timeout_ms * 1_000_000, now_ns, is_idle)

    def _on_result(self, result: StepResult) -> None:
        if result.error:
            self.weight_updates.rank_has_no_weights(result.rank, result.error)
            return
        if result.missing and self.encoder is not None and self.dispatcher.is_in_flight(result.step_id):
            self._on_missing(self.encoder, result)
            return
        step = self.dispatcher.complete(result.step_id) if result.rank == 0 else None
        if step is None:
            self._dropped.add(1)
            return
        if self.encoder is not None:
            self.encoder.completed(step.step_id, result.encoded)
        now_ns = time.monotonic_ns()
        if not step.has_encoder_parts:
            self._cost.measured(step.load, result.run_ns + result.sample_ns)
        num_taken = self.results.apply(step, result, now_ns)
        self.stats.returned(result, num_taken, time.monotonic_ns())
        if self.context.tracer.is_on:
            trace_result(self.context.tracer, step, num_taken, now_ns)

    def _on_missing(self, encoder: EncoderWork, result: StepResult) -> None:
        """Rebuild features or pixels that a rank lacks, and send the steps again that it did not run."""
        self._dispatched_again.add(self.dispatcher.give_up_flight())
        self.batch.rollback_in_flight()
        self.context.log.debug("skipped step %d: %s", result.step_id, result.missing.values())
        for unit_hash in encoder.lost(result.missing):
            self._reject_readers(encoder, unit_hash, RequestError(result.missing[unit_hash], status=503))

    def _on_pixels(self, message: Pixels | PixelsFailed) -> None:
        assert self.encoder is not None, "a text model requests no pixels"
        if isinstance(message, Pixels):
            self.encoder.pixels_came(message)
            return
        unit_hash = self.encoder.pixels_failed(message, time.monotonic_ns())
        if unit_hash:
            error = RequestError(message.message, status=message.status, code=message.code)
            self._reject_readers(self.encoder, unit_hash, error)

    def _reject_readers(self, encoder: EncoderWork, unit_hash: bytes, error: RequestError) -> None:
        """Reject the sequences that need this unit, which cannot be encoded."""
        for sequence in encoder.needs.readers_of(unit_hash):
            self._rejections.add(1)
            sequence.reader.reject(rejection(sequence.request, error))
            self.batch.finish(sequence)

    def _on_request(self, request: SequenceRequest) -> None:
        begin_ns = time.monotonic_ns()
        known = self.batch.sequences.get(request.own.request_id)
        is_stale = known is not None and known.request.own.attempt >= request.own.attempt
        if is_stale or request.shared.api_epoch < self.context.peer_epoch(request.shared.api):
            self._dropped.add(1)
            return
        if known is not None:
            self.batch.finish(known)
        num_cached_tokens = self.batch.hits_of_earlier_attempt(request)
        self.batch.waiting.came_back(request.own.request_id)
        stream = self.delivery.stream(request.tokenizer)
        is_resubmitted = request.own.attempt > 0  # a request that was accepted once is not rejected
        waiting = (0, 0) if is_resubmitted else self.batch.num_waiting_of(request.shared.source)
        try:
            self._take_adapter(request)
            sequence = self.admission.accept(request, stream, *waiting, self.context.peer_epoch(request.tokenizer))
        except RequestError as error:
            self._rejections.add(1)
            stream.reject(rejection(request, error))
            return
        sequence.num_cached_tokens = num_cached_tokens  # as in the first attempt, which may have cached its own prompt
        finish_reason = finish_reason_of(sequence)
        if finish_reason:
            # submitted again after a crash, with all of its tokens: the last token was delivered, but the finish reason was
            # lost
            stream.add(ending_output(sequence, finish_reason))
            return
        is_new_request = known is None and not request.own.attempt
        sequence.held_since_ns = time.monotonic_ns() if is_new_request else 0
        self.grammars.want(sequence)
        self.batch.add(sequence, is_new_request)
        self.aborts.watch(sequence)
        if self.context.tracer.is_on:
            self.context.tracer.span("queue", begin_ns, value=sequence.num_prompt_tokens, label=request.own.request_id)

    def _take_adapter(self, request: SequenceRequest) -> None:
        """Raise 404 if the adapter is gone: the request came from an api process that died."""
        adapter = request.shared.options.adapter
        if adapter is not None:
            assert self._adapters is not None, "LoRA adapters are disabled; start the engine with --enable-lora"
            self.stats.takes(adapter)
            self._adapters.check_there(adapter)

    def _on_abort(self, abort: Abort) -> None:
        self.batch.waiting.came_back(abort.request_id)
        sequence = self.batch.sequences.get(abort.request_id)
        if sequence is None or sequence.request.own.attempt > abort.attempt:
            return
        if abort.reason == "stop":  # the tokenizer found a stop string: the sequence is complete
            self.results.end(sequence, time.monotonic_ns())
        else:
            self.aborts.drop(sequence)

    def _on_hello(self, sender: str, hello: Hello) -> None:
        if sender == self.context.cache:
            self.block_events.draw_anew()
            return
        rank = self.context.ranks.index(sender)
        if hello.epoch < self.context.peer_epoch(sender):
            return
        is_back = self.ranks.said_hello(rank, hello)
        has_joined = self.ranks.joined(rank, hello)
        if is_back or (has_joined and self.dispatcher.num_in_flight):
            self._dispatched_again.add(self.dispatcher.give_up_flight())
            self.batch.rollback_in_flight()
        if is_back and self.ranks.has_lost_cache(rank):
            self.batch.preempt_all()
            self.weight_updates.clear_prefix_cache()
        if is_back:
            self.grammars.rank_restarted(self.batch.waiting)
        if is_back:
            self.weight_updates.rank_came_back(rank)
