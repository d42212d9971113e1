"""Structured output: masks of the tokens that may come next in each slot, ready when the next token is sampled.

A sequence with a grammar gets a `Constraint` when it takes a slot, made only from the slot's tokens. A helper thread does all
the work: llguidance runs without the GIL while the rank computes the next step, and the rank waits for the masks just before it
samples. With drafts there is a mask for each position of the window:

    position      p        p + 1    p + 2       mask i is of position p + i, with d0 .. d(i - 1) before it
    tokens        ?        d0       d1          matched ahead during the step, then taken back

A slow mask delays only its own sequence: a step waits at most `limits.FAST_NS` for all masks, and a row with a late mask gets
no token in this step. The scheduler sends the row again. The token is the same then, because it depends only on the slot.

All ranks of a group do the same, except that the first rank's clock decides: which rows are late, and which answers and drafts
end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.messages import SlotStart, StepResult
from workers.engine.extension import Extension
from workers.engine.rows import StepRows
from workers.engine.step_run import StepRun
from workers.extensions.grammars import limits
from workers.extensions.grammars.constraint import Constraint
from workers.extensions.grammars.helper_threads import HelperThreads
from workers.rank_group.collectives import Collectives
from workers.sampling.slot_sampling import SlotSampling

if TYPE_CHECKING:
    from engine.grammars.matching import Matching


class ConstraintMetrics(msgspec.Struct):
    """Counts since the last call of `take_figures`."""

    num_tokens: int = 0  # sampled with a constraint
    num_failed: int = 0  # sequences that hit a limit
    wait_ns: int = 0  # for the helper thread


class Grammars(Extension):
    """Constraints of all slots. `ranks` make the same calls in the same order."""

    def __init__(
        self, sampling: SlotSampling, max_drafts: int, make_matching: Callable[[], Matching], ranks: Collectives
    ) -> None:
        self._slots, self._records, self._ranks = sampling.slots, sampling.records, ranks
        self.constraints = self._slots.register("constraints", None, dtype=object)  # by slot, with their masks
        self._mask_shape = 1 + max_drafts, -(-self._slots.vocab_size // 32)
        self.threads = HelperThreads(make_matching)
        self.is_used = False
        self._figures = ConstraintMetrics()

    def take_figures(self) -> ConstraintMetrics:
        """Return counts since the last call."""
        figures, self._figures = self._figures, ConstraintMetrics()
        return figures

    # -------------------------------------------------------------------------------------------------------- hooks

    def on_start(self, start: SlotStart) -> None:
        if start.sampling.grammar is None:
            return
        self.is_used = True
        masks = np.zeros(self._mask_shape, np.uint32)
        answer = np.frombuffer(start.token_ids, np.int32)[start.num_prompt_tokens :].tolist()
        constraint = Constraint(start.sampling, start.num_prompt_tokens, answer, masks, start.source)
        self.constraints[start.slot] = constraint
        self._records["masks"][start.slot] = masks.ctypes.data
        self.threads.submit([constraint], lambda matching, index: constraint.make(matching))

    def choose_drafts(self, slots: np.ndarray, counts: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """Drop the draft tokens that no mask allows."""
        if not self.is_used:
            return counts
        counts = counts.copy()
        own = [index for index in np.flatnonzero(counts) if self.constraints[slots[index]] is not None]
        if not own:
            return counts
        constraints = [self.constraints[slot] for slot in slots[own]]
        begin_ns = time.monotonic_ns()
        wait([each.pending for each in constraints if each.pending and not each.is_slow], limits.FAST_NS / 1e9)
        self._figures.wait_ns += time.monotonic_ns() - begin_ns
        may_look_ahead = self._agreed([constraint.is_ready and constraint.may_look_ahead for constraint in constraints])
        self._wait([constraint for constraint, may in zip(constraints, may_look_ahead, strict=True) if may])
        for index, constraint, may in zip(own, constraints, may_look_ahead, strict=True):
            slot = slots[index]
            if not may:
                counts[index] = 0
            elif not self._is_layers(slot) and constraint.position == self._slots.num_tokens[slot]:
                begin_ns = time.thread_time_ns()
                counts[index] = constraint.num_allowed(
                    self.threads.matching, self._slots.drafts[slot, : counts[index]].tolist()
                )
                constraint.spent(time.thread_time_ns() - begin_ns, is_ahead=True)
        return counts

    def before_run(self, run: StepRun) -> None:
        """Start making the masks after each draft token while the model runs."""
        if not self.is_used:
            return
        if run.fetch_draft_tokens is not None:
            run.fetch_draft_tokens()
        rows = run.rows
        own, windows = [], []
        for row in np.flatnonzero(rows.num_drafts).tolist():
            slot, end = rows.slots[row], rows.ends[row]
            if self.constraints[slot] is not None:
                own.append(self.constraints[slot])
                windows.append(self._slots.token_ids[slot, end - rows.num_drafts[row] : end].tolist())
        if own:
            self.threads.submit(own, lambda matching, index: own[index].look_ahead(matching, windows[index]), is_ahead=True)

    def before_sample(self, run: StepRun) -> None:
        """Wait for the masks of all sampled rows; rows with late masks get no token."""
        rows = run.rows
        own = self._of(rows) if self.is_used else []
        if not own:
            return
        self._wait_in_time(own, int(np.count_nonzero(rows.num_sampled)))
        are_late = [not constraint.is_ready for _, constraint, _ in own]
        agreed = self._agreed([*are_late, *(constraint.is_over for _, constraint, _ in own)])
        self._wait([constraint for (_, constraint, _), is_late in zip(own, agreed, strict=False) if not is_late])
        for (row, constraint, first), is_late, is_over in zip(own, agreed[: len(own)], agreed[len(own) :], strict=True):
            if is_late:
                run.late_rows.append(row)
                self._slots.is_late[rows.slots[row]] = True
                self._records["num_masks"][rows.slots[row]] = 0
                continue
            slot = rows.slots[row]
            if constraint.position != first:  # a step that is repeated
                begin = min(first, constraint.position)
                constraint.take(self.threads.matching, begin, self._slots.token_ids[slot, begin:first].tolist())
            if is_over:
                constraint.end()
            self._records["first_masked"][slot] = first
            self._records["num_masks"][slot] = rows.num_sampled[row]

    def after_result(self, run: StepRun, result: StepResult) -> None:
        """Continue after the sampled tokens; report the rows that hit a limit, and the limit."""
        if not self.is_used:
            return
        rows, counts = run.rows, run.counts
        failed, own, sampled = {}, [], []
        for row, constraint, first in self._of(rows):
            if row in run.late_rows:
                continue
            end = first + int(counts[row])
            if first <= constraint.failed_at < end:
                failed[row] = constraint.error
            own.append(constraint)
            sampled.append((first, self._slots.token_ids[rows.slots[row], first:end].tolist()))
            self._figures.num_tokens += end - first
        if own:
            self.threads.submit(own, lambda matching, index: own[index].take(matching, *sampled[index]))
            self._figures.num_failed += len(failed)
        result.failed = failed

    def _of(self, rows: StepRows) -> list[tuple[int, Constraint, int]]:
        """Return row, constraint, and position of the first sampled token of the rows that sample and have a constraint."""
        constraints = self.constraints[rows.slots]
        firsts = rows.ends - rows.num_sampled + 1
        own = [row for row in np.flatnonzero(rows.num_sampled).tolist() if constraints[row] is not None]
        return [(row, constraints[row], int(firsts[row])) for row in own]

    def _agreed(self, flags: list[bool]) -> list[bool]:
        """Return the flags of the first rank."""
        return flags if self._ranks.count == 1 else self._ranks.broadcast(np.array(flags)).tolist()

    def _is_layers(self, slot: int) -> bool:
        """Whether the slot's drafts are made later, by MTP layers, when the step begins."""
        return bool(self._slots.is_drafted_by_layers[slot])

    def _wait(self, constraints: list[Constraint]) -> None:
        """Wait until all work on these is done."""
        begin_ns = time.monotonic_ns()
        for pending in {id(each.pending): each.pending for each in constraints if each.pending is not None}.values():
            pending.result()
        self._figures.wait_ns += time.monotonic_ns() - begin_ns

    def _wait_in_time(self, own: list[tuple[int, Constraint, int]], num_sampled: int) -> None:
        """Wait as long as a step may; longer only if none of the `num_sampled` rows could be sampled otherwise."""
        begin_ns = time.monotonic_ns()
        constraints = [constraint for _, constraint, _ in own]
        for is_slow, time_ns in ((False, limits.FAST_NS), (True, limits.STEP_NS)):
            wait([each.pending for each in constraints if each.pending and each.is_slow == is_slow], time_ns / 1e9)
        pending = [each.pending for each in constraints if each.pending and not each.is_ready]
        if len(pending) == num_sampled:
            wait(pending, limits.ALONE_NS / 1e9, FIRST_COMPLETED)
        self._figures.wait_ns += time.monotonic_ns() - begin_ns
