"""One rank's step from message to result: slots, inputs, the model, and the output. Independent of processes, rings and clocks.

Assembled by `workers/assembly.py`, owned by a `Runner`. Steps are idempotent: tokens, keys and values of a row depend only on
the step and the slots, so a step that was lost with a worker is run again after its SlotStarts. (Rows that follow drafts begin
where the slot ends and run once after a SlotStart.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from engine.config import EngineConfig
from engine.messages import Step, StepResult
from ops.modules import KvCache
from workers.devices.device import Device
from workers.engine.captures import Phase, StepMode
from workers.engine.extension import Extension
from workers.engine.kv_cache import DUMMY_BLOCK
from workers.engine.model_step import ModelStep
from workers.engine.output import Output
from workers.engine.plan import Plan
from workers.engine.rows import NO_ROWS, StepRows
from workers.engine.step_modes import StepModes
from workers.engine.step_run import StepRun
from workers.engine.weights import LoadedWeights, ModelLoader
from workers.models.loading import LoadedModel
from workers.rank_group.peers import Peers
from workers.weights.packing import Progress

_NONE = np.zeros(0, np.int32)
E = TypeVar("E", bound=Extension)


class ModelRunner:
    """Weights and steps of one rank. A step has two parts: `begin` enqueues it, `end` waits for it and samples. `make_plan`: of
    a model and captured sizes; `extensions`: parts of a step that not every model has."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        model_step: ModelStep,
        cache: KvCache,
        loader: ModelLoader,
        make_plan: Callable[..., Plan],
        peers: Peers,
        output: Output,
        extensions: Sequence[Extension],
    ) -> None:
        self.config, self.device = config, device
        self.model_step, self.inputs, self.slots = model_step, model_step.inputs, model_step.slots
        self.extensions = tuple(extensions)
        self.modes = StepModes(config, device, model_step, peers, self.extensions)
        self.mode = StepMode(Phase.NONE, config.speculative_config.max_drafts)  # of the last step
        self.weights = LoadedWeights()
        self._loaded: LoadedModel | None = None  # the weights in use
        is_uniform = config.plan != "captured" and config.ops == "native"
        self.ran: list[tuple[int, bool]] | None = None if is_uniform else []  # rows of steps, and whether they were replayed
        self._cache, self._loader, self._make_plan, self._peers, self._output = cache, loader, make_plan, peers, output
        self._has_drafts = any(extension.has_drafts for extension in self.extensions)
        self._ended: StepRun | None = None  # the last step, until its result is sent

    def find(self, kind: type[E]) -> E | None:
        """Return the extension of this `kind`, or None."""
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)

    # ------------------------------------------------------------------------------------------------------ weights

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> None:
        """Load the checkpoint at `path` beside the present weights and then replace them (`ModelLoader.load`). On an error the
        present ones stay."""
        loaded = self._loader.load(path, version, on_progress, contents)
        try:
            plan = self._plan_of(loaded, version)
        except Exception:  # a card without room for both, for example
            self._use_present()
            raise
        self._loaded, self.weights = loaded, LoadedWeights.of(path, version, plan, loaded)

    def _plan_of(self, loaded: LoadedModel, version: int) -> Plan:
        self._peers.bind(loaded.mixtures)
        # padded rows write the dummy block and masked keys are read from it, so NaN of earlier weights must not stay there
        self.device.ops.clear_block(self._cache, DUMMY_BLOCK)
        for extension in self.extensions:
            extension.on_load(loaded, version)
        plan = self._make_plan(loaded.model, self.modes.sizes)
        self.modes.load(plan)
        return plan

    def _use_present(self) -> None:
        """Let the extensions use the present weights again, or none."""
        if self._loaded is None or self.weights.plan is None:
            self.clear()
            return
        for extension in self.extensions:
            extension.on_load(self._loaded, self.weights.version)
        self.modes.load(self.weights.plan, has_run=True)
        self.device.release_unused()

    def clear(self) -> None:
        """Release the weights."""
        self.weights, self._loaded, self._ended = LoadedWeights(), None, None
        for extension in self.extensions:
            extension.on_unload()
        self.device.release_unused()

    # --------------------------------------------------------------------------------------------------------- steps

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may begin before the result of the last one is taken."""
        return not self._has_drafts and self._peers.are_none

    def run(self, step: Step) -> StepResult:
        """Begin a step and end it."""
        return self.end(self.begin(step))

    def begin(self, step: Step) -> StepRun:
        """Enqueue a step up to its first logits. The one before must have ended, because its tokens are read, unless they are
        on the device (`StepRun.is_sampled_on_device`). A call without weights is a bug of the scheduler (AssertionError)."""
        plan = self.weights.plan
        assert plan is not None, f"step {step.step_id} arrived while the weights are cleared"
        begin_ns = time.monotonic_ns()
        self._peers.ranks.begin_step(step.step_id)
        run = StepRun(step, self._take(step), plan)
        for extension in self.extensions:
            extension.on_rows(run)
        if run.missing:
            if self._peers.share_experts:  # the rank group needs this rank anyway
                self.run_without_rows()
            return run
        run.mode = self.mode = self.modes.mode(run.rows)
        self.modes.capture_together(plan, run.mode)
        for extension in self.extensions:
            extension.before_inputs(run)
        kept_counts, flags = self._output.prepare(run)
        self.model_step.set_rows(run.rows, kept_counts, run.mode, flags)
        for extension in self.extensions:
            extension.before_run(run)
        self.model_step.run(plan, run.mode)
        run.num_tokens = self.inputs.num_tokens
        self._output.begin(run)
        for extension in self.extensions:
            extension.after_run(run)
        if self.ran is not None:
            self.ran.append((run.mode.size or run.num_tokens, run.mode.size in plan.captured))
        run.run_ns = time.monotonic_ns() - begin_ns
        return run

    def end(self, run: StepRun) -> StepResult:
        """Wait for a step; afterwards its tokens are in the slots."""
        if run.missing:
            return self._report(run)
        begin_ns = time.monotonic_ns()
        for extension in self.extensions:
            extension.before_sample(run)
        self.device.finish()
        result = self._output.end(run)
        for extension in self.extensions:
            extension.after_result(run, result)
        result.weight_version, result.encoded = self.weights.version, run.encoded
        result.num_tokens, result.sample_ns = run.num_tokens, run.sample_ns
        run.step_ns = run.run_ns + time.monotonic_ns() - begin_ns
        result.run_ns = run.step_ns - run.sample_ns
        self._ended = run
        return result

    def draft(self) -> int:
        """Propose draft tokens for later steps; call it after sending the result of a step. Return the nanoseconds spent on
        drafts, including those within the step; 0: no work."""
        run, self._ended = self._ended, None
        if run is None or not self._has_drafts:
            return 0
        for extension in self.extensions:
            extension.after_send(run)
        return run.draft_ns and run.draft_ns + run.draft_in_step_ns

    def run_without_rows(self) -> None:
        """Take part in a step of the rank group without rows of this replica: compute experts for the rows of others."""
        plan = self.weights.plan
        assert plan is not None, "a rank without weights serves no requests"
        self.mode = self.modes.mode(NO_ROWS)
        self.modes.capture_together(plan, self.mode)
        self.model_step.set_rows(NO_ROWS, _NONE, self.mode)
        self.model_step.run(plan, self.mode)
        self.device.finish()

    def _take(self, step: Step) -> StepRows:
        """Put the step's new sequences and block-table growth into the slots."""
        for extension in self.extensions:
            extension.on_step(step)
        for start in step.starts:
            self.slots.start(start)
            self.inputs.start(self.slots, start.slot)
            for extension in self.extensions:
                extension.on_start(start)
        block_slots = np.frombuffer(step.block_slots, np.int32)
        indexes = np.frombuffer(step.block_indexes, np.int32)
        tables = np.frombuffer(step.block_tables, np.int32) if step.block_tables else np.zeros_like(block_slots)
        self.slots.block_tables[block_slots, tables, indexes] = np.frombuffer(step.block_ids, np.int32)
        self.inputs.grow(tables, block_slots, indexes)
        return StepRows.of(step, self.slots, self._choose if self._has_drafts else None)

    def _choose(self, slots: np.ndarray, counts: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        for extension in self.extensions:
            counts = extension.choose_drafts(slots, counts, num_rows, num_sampled)
        return counts

    def _report(self, run: StepRun) -> StepResult:
        """Return which media units the step lacks."""
        return StepResult(
            step_id=run.step.step_id,
            rank=self._peers.rank % self.config.tensor_parallel_size,
            weight_version=self.weights.version,
            token_ids=b"",
            logprobs=b"",
            ranks=b"",
            dispatch_ns=run.step.dispatch_ns,
            missing=run.missing,
        )
