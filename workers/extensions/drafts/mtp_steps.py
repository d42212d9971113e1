"""MTP layers in a step: when the drafter (`mtp.py`) does each part of its work. An extension of the runner."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workers.engine.captures import StepMode
from workers.engine.extension import Extension
from workers.engine.plan import Plan
from workers.engine.step_run import StepRun
from workers.extensions.drafts.mtp import MtpDrafter

if TYPE_CHECKING:
    from workers.models.loading import LoadedModel


class MtpSteps(Extension):
    """Steps of MTP `layers`. Their rows of a step are `StepRun.keeps_all`: they keep all hidden states."""

    def __init__(self, layers: MtpDrafter) -> None:
        self.layers = layers

    def on_load(self, loaded: LoadedModel, version: int) -> None:
        self.layers.load(loaded.model)

    def on_unload(self) -> None:
        self.layers.clear()

    def on_capture(self, plan: Plan, mode: StepMode) -> None:
        self.layers.store(plan, mode)

    def on_warm_up(self) -> None:
        self.layers.warm_up()

    def on_forget_captures(self) -> None:
        self.layers.forget_captures()

    def before_inputs(self, run: StepRun) -> None:
        step, rows = run.step, run.rows
        if step.starts or step.block_slots:
            self.layers.begin(rows, step)
        if step.num_drafts or step.wants_drafts:  # else no layer runs and no hidden states are kept
            begin_ns = time.monotonic_ns()
            run.keeps_all = self.layers.are_drafting(rows, step.wants_drafts)
            self.layers.prepare(rows, run.mode, run.keeps_all)
            run.draft_in_step_ns = time.monotonic_ns() - begin_ns

    def before_run(self, run: StepRun) -> None:
        if run.keeps_all is None:
            return
        self.layers.draft_on_device()
        if self.layers.has_draft_tokens:
            run.fetch_draft_tokens = self.layers.fetch_draft_tokens

    def after_run(self, run: StepRun) -> None:
        if run.keeps_all is not None and run.num_tokens and run.keeps_all.any():
            self.layers.store(run.plan, run.mode)

    def after_send(self, run: StepRun) -> None:
        if run.keeps_all is None or not run.keeps_all.any():
            return
        begin_ns = time.monotonic_ns()
        self.layers.keep(run.rows, run.counts, run.keeps_all, run.kept_ends, run.plan)
        run.draft_ns += time.monotonic_ns() - begin_ns
