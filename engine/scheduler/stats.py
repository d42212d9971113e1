"""The scheduler's metrics: its gauges, and the split of every step into schedule, dispatch, run, sample and return.

Used by the scheduler process alone; names and meanings are in `engine/metrics.py`.
"""

from __future__ import annotations

from array import array

from engine.messages import AdapterUse, StepResult, WeightsState
from engine.process.adapters import AdapterGauge
from engine.process.context import ActorContext
from engine.scheduler.batch_state import BatchState
from engine.scheduler.sequence import Sequence, SequenceState
from engine.scheduler.states import StatePool
from engine.scheduler.weight_state import WeightState


class SchedulerStats:
    """Metrics of the scheduler."""

    def __init__(self, context: ActorContext, batch: BatchState, weights: WeightState) -> None:
        self._batch = batch
        self._weights = weights
        cell = context.counter
        self._running = cell("num_requests_running")
        self._waiting = cell("num_requests_waiting")
        self._usage = cell("kv_cache_usage_perc")
        self._free_blocks = cell("num_free_kv_blocks")
        self._cached_blocks = cell("num_cached_kv_blocks")
        self._free_slots = cell("num_free_slots")
        self._used_states = cell("num_used_states")
        self._cached_states = cell("num_cached_states")
        self._state_hits = cell("state_cache_hits_total")
        self._state_evictions = cell("state_cache_evictions_total")
        self._tokens_to_compute = cell("num_tokens_to_compute")
        self._slow_streams = cell("slow_streams")
        self._version = cell("engine_weight_version")
        self._state = cell("engine_state")
        self._queries = cell("prefix_cache_queries_total")
        self._hits = cell("prefix_cache_hits_total")
        self._steps = cell("steps_total")
        self._tokens = cell("scheduled_tokens_total")
        self._step_tokens = context.histogram("iteration_tokens_total")
        self._drafted_rows = cell("spec_decode_num_drafts_total")
        self._drafts = cell("spec_decode_num_draft_tokens_total")
        self._accepted_drafts = cell("spec_decode_num_accepted_tokens_total")
        places = range(context.config.speculative_config.max_drafts)
        self._has_drafts = len(places) > 0
        self._by_position = [
            [cell(f"spec_decode_num_{what}_tokens_per_pos_total", position=str(place)) for place in places]
            for what in ("draft", "accepted", "emitted")
        ]
        self._answering_rows = cell("spec_decode_num_rows_total")
        self._resting_rows = cell("spec_decode_num_resting")
        self._queue_time = context.histogram("request_queue_time_seconds")
        self._schedule = context.histogram("step_schedule_seconds")
        self._dispatch = context.histogram("step_dispatch_seconds")
        self._run = context.histogram("step_run_seconds")
        self._sample = context.histogram("step_sample_seconds")
        self._return = context.histogram("step_return_seconds")
        cell("num_kv_blocks").set(context.config.num_kv_blocks)
        cell("num_states").set(context.config.num_states)
        self._adapters_running = AdapterGauge(context, "adapter_requests_running")
        self._adapters_waiting = AdapterGauge(context, "adapter_requests_waiting")
        self._max_loras = context.config.max_loras

    def admitted(self, sequence: Sequence, now_ns: int) -> None:
        """Note that a sequence got its slot, perhaps not for the first time."""
        if sequence.first_scheduled_ns:
            return
        sequence.first_scheduled_ns = now_ns
        self._queue_time.observe(max(0, now_ns - sequence.request.shared.arrival_ns) / 1e9)
        if self._batch.limits.has_prefix_cache:
            self._queries.add(sequence.num_prompt_tokens)
            self._hits.add(sequence.num_cached_tokens)

    def dispatched(self, num_tokens: int, duration_ns: int) -> None:
        """Count a step that was chosen and sent."""
        self._schedule.observe(duration_ns / 1e9)
        self._step_tokens.observe(num_tokens)
        self._tokens.add(num_tokens)

    def returned(self, result: StepResult, num_taken: list[int], now_ns: int) -> None:
        """Count a step's result; `num_taken`: tokens taken from each of its chunks."""
        self._steps.add(1)
        self._dispatch.observe(max(0, result.received_ns - result.dispatch_ns) / 1e9)
        self._run.observe(result.run_ns / 1e9)
        self._sample.observe(result.sample_ns / 1e9)
        self._return.observe(max(0, now_ns - result.received_ns - result.run_ns - result.sample_ns) / 1e9)
        if self._has_drafts:
            self._count_drafts(result, num_taken)

    def _count_drafts(self, result: StepResult, num_taken: list[int]) -> None:
        counts, num_drafts = array("i", result.counts), array("i", result.num_drafts)
        rows = [row for row, num in enumerate(num_drafts) if num]
        num_rows = len(counts) - counts.count(0)
        self._answering_rows.add(num_rows)
        self._resting_rows.set(num_rows - len(rows))
        if not rows:
            return
        self._drafted_rows.add(len(rows))
        drafts, accepted = [num_drafts[row] for row in rows], [counts[row] - 1 for row in rows]
        emitted = [min(num_taken[row], counts[row] - 1) for row in rows]  # the last token of a row was no draft
        self._drafts.add(sum(drafts))
        self._accepted_drafts.add(sum(accepted))
        for cells, numbers in zip(self._by_position, (drafts, accepted, emitted), strict=True):
            for place in range(max(numbers, default=0)):
                cells[place].add(sum(number > place for number in numbers))

    def show_load(self) -> None:
        """Show the load by which tokenizers choose replicas. Called for each record of requests, because from then on they rely
        on it."""
        batch = self._batch
        self._running.set(len(batch.running))
        self._waiting.set(batch.num_waiting)
        self._tokens_to_compute.set(batch.num_tokens_to_compute)
        self._free_blocks.set(batch.pool.num_free // batch.limits.pages_per_block)
        self._free_slots.set(batch.num_free_slots)

    def _show_states(self, states: StatePool) -> None:
        self._used_states.set(states.num_used)
        self._cached_states.set(states.num_kept)
        for cell, count in ((self._state_hits, states.num_hits), (self._state_evictions, states.num_evictions)):
            cell.add(count)
        states.num_hits = states.num_evictions = 0

    def show_slow_streams(self) -> None:
        """Show how many running sequences have a reader with a full ring."""
        self._slow_streams.set(sum(sequence.reader.is_slow for sequence in self._batch.running))

    def show_adapters(self) -> None:
        """Show running and waiting sequences by adapter. A sequence on its way out of the batch counts as waiting."""
        running, waiting = [0] * self._max_loras, [0] * self._max_loras
        for sequence in self._batch.sequences.values():
            adapter = sequence.request.shared.options.adapter
            if adapter is not None:
                (running if sequence.state is SequenceState.RUNNING else waiting)[adapter.slot] += 1
        self._adapters_running.show(running)
        self._adapters_waiting.show(waiting)

    def takes(self, adapter: AdapterUse | None) -> None:
        """Count a sequence of this adapter until the gauges are shown again."""
        self._adapters_waiting.add(adapter, 1)

    def show(self) -> None:
        """Update the gauges."""
        pool = self._batch.pool
        num_free = pool.num_free
        self._usage.set(1 - num_free / pool.num_pages)
        self._cached_blocks.set(pool.prefix_cache.num_pages // self._batch.limits.pages_per_block)
        self.show_load()
        if pool.states is not None:
            self._show_states(pool.states)
        if self._max_loras:
            self.show_adapters()
        self._version.set(0 if self._weights.state is WeightsState.CLEARED else self._weights.version)
        self._state.set(self._weights.state)
