"""Rows of a step as arrays, with the rank's own knowledge: where a row begins that follows drafts, and which drafts it
verifies.

Used by the runner. A row of n tokens with d drafts computes n + d positions, and samples a token after each of the last 1 + d:

    position      p        p + 1    p + 2    p + 3        the row begins at p, the slot's last token
    computed      last     draft 0  draft 1  draft 2
    sampled       t0       t1       t2       t3           draft i is accepted iff it equals t_i and all before it are
    d0 = t0, d1 = t1, d2 != t2:  t0, t1 and t2 are the row's tokens; the next row writes position p + 3 again
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from engine.messages import Step
from ops import _cpu
from workers.engine.batch_slots import BatchSlots

# slots, granted drafts, rows and sampled rows of the step -> drafts of each slot
Choice = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


class StepRows(msgspec.Struct, frozen=True):
    """Rows in slot order; int32 [n] each."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray  # positions, including drafts
    num_sampled: np.ndarray  # tokens to sample at the end of the row: 1 + drafts, or 0
    num_drafts: np.ndarray

    @staticmethod
    def of(step: Step, slots: BatchSlots, choose: Choice | None = None) -> StepRows:
        """Return rows with the slots' drafts, as many as granted and chosen (None: all), written after their tokens. A row is
        skipped if its sequence has all its tokens or sampled a stop token that the scheduler did not know of; if it got no
        token in the last step (`is_late`); or if its last step did not run because features were missing: the scheduler gives
        up that step and those after it."""
        slot_ids = np.frombuffer(step.slots, np.int32)
        starts = np.frombuffer(step.start, np.int32)
        counts = np.frombuffer(step.num_tokens, np.int32)
        num_sampled = np.frombuffer(step.is_sampling, np.int8).astype(np.int32)
        is_out = slots.is_ended[slot_ids]
        if slots.is_late[slot_ids].any():
            is_following = np.frombuffer(step.is_following, np.bool_) if step.is_following else np.zeros(len(starts), np.bool_)
            has_tokens = ~is_following & (starts + counts <= slots.num_tokens[slot_ids])
            slots.is_late[slot_ids[has_tokens]] = False
            is_out = is_out | slots.is_late[slot_ids]
        if is_out.any():
            counts, num_sampled = counts * ~is_out, num_sampled * ~is_out
        if not step.is_following and not step.num_drafts:
            return StepRows(slot_ids, starts, counts, num_sampled, np.zeros_like(counts))
        starts, counts, num_drafts = starts.copy(), counts.copy(), np.zeros_like(counts)
        if step.num_drafts:
            num_drafts[:] = np.frombuffer(step.num_drafts, np.int32)
        are_following = _cpu.address(step.is_following) if step.is_following else 0
        changed = _cpu.address(slot_ids), len(slot_ids)
        numbers = _cpu.address(starts), _cpu.address(counts), _cpu.address(num_sampled), _cpu.address(num_drafts)
        _cpu.follow(*changed, are_following, *numbers, _cpu.address(slots.num_tokens), _cpu.address(slots.max_total_tokens))
        if step.num_drafts:
            if choose is None:
                num_drafts = np.minimum(num_drafts, slots.num_drafts[slot_ids])
            else:
                num_drafts = choose(slot_ids, num_drafts, int(counts.sum()), int(num_sampled.sum()))
            slots.put_drafts(slot_ids, num_drafts, counts, num_sampled)
        return StepRows(slot_ids, starts, counts, num_sampled, num_drafts)

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """Return addresses for native code: slots, starts, counts, num_sampled, num_drafts; and the number of rows."""
        numbers = _cpu.address(self.starts), _cpu.address(self.counts), _cpu.address(self.num_sampled)
        return _cpu.address(self.slots), *numbers, _cpu.address(self.num_drafts), len(self.slots)

    @property
    def ends(self) -> np.ndarray:
        ends: np.ndarray = self.starts + self.counts
        return ends


NO_ROWS = StepRows(*(np.zeros(0, np.int32) for _ in range(5)))


class SampledTokens(msgspec.Struct, frozen=True):
    """Tokens that rows sample, row by row; int32 [m] each."""

    rows: np.ndarray  # row of each token
    places: np.ndarray  # index within the row
    slots: np.ndarray
    positions: np.ndarray  # of the token

    @staticmethod
    def of(rows: StepRows) -> SampledTokens:
        num_sampled = rows.num_sampled
        offsets = np.cumsum(num_sampled) - num_sampled
        row_ids = np.arange(len(num_sampled)).repeat(num_sampled)
        places = np.arange(len(row_ids)) - offsets.repeat(num_sampled)
        positions = (rows.ends - num_sampled + 1)[row_ids] + places
        return SampledTokens(row_ids, places, rows.slots[row_ids], positions)

    def accepted(self, rows: StepRows, token_ids: np.ndarray, slot_token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the sampled `token_ids` (int32 [m]) are the rows' next tokens, bool [m], and how many each row has,
        int32 [n]: all before the first one that differs from the draft in its place, and that one."""
        if not rows.num_drafts.any():
            return np.ones(len(token_ids), np.bool_), rows.num_sampled
        accepted, counts, ends = np.empty(len(token_ids), np.bool_), np.empty_like(rows.counts), rows.ends
        _cpu.accept(
            _cpu.address(rows.slots),
            len(counts),
            _cpu.address(rows.num_sampled),
            _cpu.address(rows.num_drafts),
            _cpu.address(ends),
            _cpu.address(token_ids),
            _cpu.address(slot_token_ids),
            slot_token_ids.shape[1],
            _cpu.address(accepted),
            _cpu.address(counts),
        )
        return accepted, counts
