"""How many draft tokens each row of a step verifies: drafts are added by probability as long as the expected tokens per step
time grow.

Used by `drafting.py`; native (ops/cpu/native/draft_lengths.h), over arrays of the slots. The policy learns the acceptance rate
of each class of drafts, whether drafts help a sequence at all (a new one starts with the rate of recent ones), and the time of
steps by number of rows. This decides how many drafts are verified, never which tokens. The caller reads the clock.

If drafts do not pay, one is still tried from time to time: for a sequence that had none for 16, 32, ... 256 tokens, as long as
trials take less than 1/200 of the time (for MTP layers including the preparation). Now and then a step runs without drafts, to
measure its time. After 1,024 steps in which no drafts were expected to pay, the times of steps with drafts, rejections and the
prior of new sequences are forgotten, as they may be accidental. If drafts are not accepted even then, the interval doubles, up
to 16,384 steps.
"""

from __future__ import annotations

import numpy as np

from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.drafter import Drafts


class Lengths:
    """Policy over `slots`. `priors` (float64): acceptance rate of each class before anything is learned. `first_classes`: of
    each method; `are_layers`: whether its drafts are made when the step begins."""

    def __init__(
        self, slots: BatchSlots, priors: np.ndarray, first_classes: list[int], are_layers: list[bool], *, is_adaptive: bool
    ) -> None:
        arrays = slots.drafts, slots.draft_classes, slots.draft_chances, slots.num_drafts, slots.draft_trusts
        drafts, classes, chances, num_drafts, trusts = (_cpu.address(array) for array in arrays)
        self._native = _cpu.DraftLengths(
            *(priors.tolist(), first_classes, list(map(int, are_layers)), is_adaptive, slots.drafts.shape[1]),
            *(drafts, classes, chances, num_drafts),
            *(trusts, slots.draft_trusts.shape[1], _cpu.address(slots.num_rested), _cpu.address(slots.draft_pauses)),
            _cpu.address(slots.is_drafted_by_layers),
            _cpu.address(slots.is_ended),
        )
        self._counted = [0] * (2 * len(first_classes))

    @property
    def least_chance(self) -> float:
        """Return the probability from which one more draft token paid in the last step; 0: every one did, or unknown."""
        return self._native.least_chance

    def clear(self, slots: np.ndarray) -> None:
        """Clear the drafts of `slots` (int32 [n])."""
        self._native.clear(_cpu.address(slots), len(slots))

    def offer(self, slots: np.ndarray, found: Drafts, first_class: int = 0) -> None:
        """Offer drafts for `slots` (int32 [n]); they replace drafts with fewer expected tokens. Their classes count from
        `first_class`."""
        places = _cpu.address(found.token_ids), _cpu.address(found.counts), _cpu.address(found.classes)
        self._native.offer(_cpu.address(slots), len(slots), *places, first_class)

    def choose(self, slots: np.ndarray, granted: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """Return how many drafts of `slots` (int32 [n]) to verify, at most `granted[i]` (int32 [n]), in a step with `num_rows`
        further rows, `num_sampled` of which sample a token; int32 [n]."""
        chosen, granted = np.empty(len(slots), np.int32), np.ascontiguousarray(granted, np.int32)
        rows = num_rows, num_sampled
        self._native.choose(_cpu.address(slots), len(slots), _cpu.address(granted), *rows, _cpu.address(chosen))
        return chosen

    def learn(self, slots: np.ndarray, num_drafts: np.ndarray, counts: np.ndarray) -> None:
        """Learn from the rows of a step (int32 [n] each): verified drafts and resulting tokens."""
        num_drafts, counts = np.ascontiguousarray(num_drafts, np.int32), np.ascontiguousarray(counts, np.int32)
        self._native.learn(_cpu.address(slots), len(slots), _cpu.address(num_drafts), _cpu.address(counts))

    def take_verified(self) -> list[tuple[int, int]]:
        """Return the verified and accepted drafts of each method since the last call; empty if there were none."""
        counted = self._native.num_verified
        if counted == self._counted:
            return []
        new = [now - before for now, before in zip(counted, self._counted, strict=True)]
        self._counted = counted
        return list(zip(new[: len(new) // 2], new[len(new) // 2 :], strict=True))

    def mark_shared(self, slots: np.ndarray) -> None:
        """Record that drafts of `slots` (int32 [n]) came from another rank."""
        self._native.tell_layers(_cpu.address(slots), len(slots))

    def learn_time(self, num_rows: int, step_ns: int, *, has_prompts: bool, has_drafts: bool, num_steps: int = 1) -> None:
        """Learn the time of a step with `num_rows` rows, including drafting for the next one. `has_prompts`: prompts were
        computed in it or sequences started. It counts as `num_steps` steps."""
        self._native.took(has_prompts, has_drafts, num_rows, step_ns, num_steps)

    def wanted(self, slots: np.ndarray) -> np.ndarray:
        """Return how many drafts would pay in the next step, int32 [n]."""
        wanted = np.empty(len(slots), np.int32)
        self._native.wanted(_cpu.address(slots), len(slots), _cpu.address(wanted))
        return wanted

    def num_idle(self, slots: np.ndarray) -> int:
        """Return for how many further steps `slots` (int32 [n]) need no drafts: no trial is due or affordable."""
        return self._native.num_idle(_cpu.address(slots), len(slots))

    def wanted_by_new_requests(self) -> int:
        """Return how many drafts are expected to pay for a new sequence."""
        return self._native.wanted_by_new_requests()
