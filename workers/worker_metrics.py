"""Metrics of a rank, in the engine's counters: steps, drafts, structured output, collectives, experts, its device, its weights.

Part of `WorkerActor`, which calls it; each cell has this rank as its only writer. Values come from the runner's core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.config import DRAFT_METHODS
from engine.messages import StepResult
from engine.metric_labels import DEVICE_DTYPES, WEIGHT_CACHE_OUTCOMES
from engine.process.context import ActorContext
from shm.counters import Cell
from workers.rank_group.communicator import Communicator

if TYPE_CHECKING:
    from workers.engine.runner import ModelRunner
    from workers.extensions.drafts.drafting import Drafting
    from workers.extensions.grammars.grammars import Grammars


class WorkerMetrics:
    """The cells of one rank, written by its loop."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._step = context.counter("worker_step")
        self._steps = context.counter("worker_steps_total")
        self._tokens = context.counter("worker_tokens_total")
        self._busy_seconds = context.counter("worker_busy_seconds_total")
        self._idle_seconds = context.counter("worker_idle_seconds_total")
        self._encoder_seconds = context.counter("encoder_seconds_total")
        self._constrained_tokens = context.counter("constrained_tokens_total")
        self._constraint_failures = context.counter("constraint_failures_total")
        self._constraint_wait = context.counter("constraint_wait_seconds_total")
        self._collectives = context.counter("collectives_total")
        self._collective_wait = context.counter("collective_wait_seconds_total")
        self.rank_group_epoch = context.counter("rank_group_epoch")
        self.rank_group_steps = context.counter("rank_group_steps_total")
        self.empty_rank_group_steps = context.counter("empty_rank_group_steps_total")
        self._rebalances = context.counter("eplb_rebalances_total")
        self._moved_experts = context.counter("eplb_moved_experts_total")
        self._imbalance = context.counter("eplb_predicted_imbalance")
        self._weights_bytes = context.counter("weights_bytes")
        self._weights_version = context.counter("rank_weight_version")
        self._load_seconds = context.counter("weights_load_seconds")
        self._cache_loads = {found: context.counter("weight_cache_loads_total", found=found) for found in WEIGHT_CACHE_OUTCOMES}
        self._uncaptured_sizes = context.counter("uncaptured_step_sizes")
        self._captured_sizes = context.counter("captured_step_sizes")
        self._captured_rows = context.histogram("captured_step_rows")
        self._eager_rows = context.histogram("eager_step_rows")
        self._to_device = context.counter("device_copies_total", to="device")
        self._to_host = context.counter("device_copies_total", to="host")
        self._device_wait = context.counter("device_wait_seconds_total")
        self._device_memory = context.counter("device_memory_bytes")
        self._draft_seconds = context.counter("spec_decode_draft_seconds_total")
        self._index_bytes = context.counter("spec_decode_index_bytes")
        self._drafts = {method: self._cells_of(method) for method in DRAFT_METHODS}

    def _cells_of(self, method: str) -> list[Cell]:
        names = (f"spec_decode_num_{what}_tokens_by_method_total" for what in ("draft", "accepted"))
        return [self._context.counter(name, method=method) for name in names]

    # ---------------------------------------------------------------------------------------------------------- steps

    def began(self, step_id: int) -> None:
        self._step.set(step_id)

    def ended(self, core: ModelRunner, result: StepResult, busy_ns: int, communicators: Sequence[Communicator]) -> None:
        """Count a step with `result`, `busy_ns` after its arrival."""
        self._idle_seconds.add(result.idle_ns / 1e9)
        self._take_collectives(communicators)
        self._take_device_work(core)
        if self._grammars is not None and self._grammars.is_used:
            self._take_constraints(self._grammars)
        self._steps.add(1)
        self._tokens.add(result.num_tokens)
        self._busy_seconds.add(busy_ns / 1e9)
        if self._media is not None:
            self._encoder_seconds.set(self._media.encode_ns / 1e9)

    def ended_without_rows(self, busy_ns: int, communicators: Sequence[Communicator]) -> None:
        """Count a step of the rank group in which this replica had no rows."""
        self._take_collectives(communicators)
        self._busy_seconds.add(busy_ns / 1e9)

    def _take_constraints(self, grammars: Grammars) -> None:
        figures = grammars.take_figures()
        self._constrained_tokens.add(figures.num_tokens)
        self._constraint_failures.add(figures.num_failed)
        self._constraint_wait.add(figures.wait_ns / 1e9)

    def _take_collectives(self, communicators: Sequence[Communicator]) -> None:
        for communicator in communicators:
            num_calls, waited_ns = communicator.take_figures()
            self._collectives.add(num_calls)
            self._collective_wait.add(waited_ns / 1e9)

    def _take_device_work(self, core: ModelRunner) -> None:
        if core.ran is None:
            return
        for num_rows, is_captured in core.ran:
            (self._captured_rows if is_captured else self._eager_rows).observe(num_rows)
        core.ran.clear()
        self._show_captures(core)  # ranks of a rank group capture in a step
        traffic = core.device.traffic
        self._to_device.set(traffic.num_to_device)
        self._to_host.set(traffic.num_to_host)
        self._device_wait.set(traffic.waited_ns / 1e9)

    def drafted(self, draft_ns: int) -> None:
        """Count the time of drafting."""
        self._draft_seconds.add(draft_ns / 1e9)

    def take_drafts(self, drafting: Drafting, *, is_first: bool) -> None:
        """Count verified and accepted drafts, on the first rank only."""
        self._index_bytes.set(drafting.num_bytes)
        for method, *numbers in drafting.take_figures() if is_first else ():
            for cell, number in zip(self._drafts[method], numbers, strict=True):
                cell.add(number)

    def rebalanced(self, num_moved: int, imbalance: float) -> None:
        self._rebalances.add(1)
        self._moved_experts.add(num_moved)
        self._imbalance.set(imbalance)

    # ----------------------------------------------------------------------------------------------- device and weights

    def show_device(self, core: ModelRunner) -> None:
        """Show the device's capabilities, and ops without a correct candidate."""
        from workers.extensions.drafts.mtp_steps import MtpSteps
        from workers.extensions.grammars.grammars import Grammars
        from workers.extensions.media.media import Media

        self._grammars, self._media, self._mtp = core.find(Grammars), core.find(Media), core.find(MtpSteps)
        can = core.device.capabilities
        self._context.counter("device_has_graphs").set(can.has_graphs)
        self._context.counter("device_keeps_cache").set(can.is_arena_lasting)
        for dtype in DEVICE_DTYPES:
            self._context.counter("device_multiplies", dtype=dtype).set(dtype in can.dtypes)
        for op, candidate in core.device.fallbacks:
            self._context.counter("op_fallbacks_total", op=op, candidate=candidate).add(1)

    def loaded(self, core: ModelRunner, load_ns: int) -> None:
        """Count a load of weights and show them."""
        self._load_seconds.set(load_ns / 1e9)
        if core.weights.cache in self._cache_loads:
            self._cache_loads[core.weights.cache].add(1)
        self.show_weights(core)

    def show_weights(self, core: ModelRunner) -> None:
        self._weights_bytes.set(core.weights.num_bytes)
        self._weights_version.set(core.weights.version)
        self._show_captures(core)
        self._device_memory.set(core.device.memory_bytes())

    def _show_captures(self, core: ModelRunner) -> None:
        plan, num_of_drafts = core.weights.plan, self._mtp.layers.num_uncaptured if self._mtp else 0
        self._uncaptured_sizes.set((len(plan.failed_sizes) if plan else 0) + num_of_drafts)
        self._captured_sizes.set(len(plan.captured) if plan else 0)
