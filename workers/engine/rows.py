"""A step's rows as arrays, with what the rank alone knows: where a row begins that follows drafts, and which it verifies.

Used by the runner. A row of n tokens with d drafts computes n + d positions, and samples a token after each of the last 1 + d:

    position      p        p + 1    p + 2    p + 3        the row begins at p, the slot's last token
    computed      last     draft 0  draft 1  draft 2
    sampled       t0       t1       t2       t3           draft i is accepted iff it equals t_i and all before it are
    d0 = t0, d1 = t1, d2 != t2:  t0, t1 and t2 are the row's tokens; what lies at p + 3 is written again by the next row
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from engine.messages import Step
from ops import _cpu
from workers.engine.batch_slots import BatchSlots

# of slots, with so many drafts granted, in a step of so many rows of which so many give a token: how many drafts each gets
Choice = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


class StepRows(msgspec.Struct, frozen=True):
    """Rows in slot order; int32 [n] each."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray  # positions, drafts among them
    num_sampled: np.ndarray  # of the last positions, each of which gets a token: 1 + drafts; 0: none
    num_drafts: np.ndarray

    @staticmethod
    def of(step: Step, slots: BatchSlots, choose: Choice | None = None) -> StepRows:
        """Rows with the drafts that `slots` have for them, as many as are granted and chosen (None: all that are), put behind
        the slots' tokens. No row gets a sequence that has all its tokens or drew a stop token, which its scheduler did not know
        yet; one that had no token in the last step (`is_late`); or one whose last step was not run for want of features: the
        scheduler gives that up, and the steps behind it."""
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
    """The tokens that rows sample, one row's after the other's; int32 [m] each."""

    rows: np.ndarray  # which row each belongs to
    places: np.ndarray  # which of its row's it is
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
        """Which of the sampled `token_ids` (int32 [m]) are the rows' next tokens, bool [m], and how many each row has,
        int32 [n]: those before the first that is not the draft in its place, and that one."""
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
