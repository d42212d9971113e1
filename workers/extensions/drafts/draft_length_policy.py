"""How many drafts each row of a step gets: added in order of their chance while the tokens to be expected for the time that the
step takes become more.

Used by `drafting.py`; native (ops/cpu/native/draft_lengths.h), over arrays of the slots. What is learned: of each class of
drafts how many are accepted where they are of use at all, of each sequence whether they are, where a new one is taken for what
the last ones were, and how long steps of so many rows take. They decide how many, never which. Clocks are read elsewhere. Where
none pay, one of the step is tried all the same: of a sequence that had none for 16, 32, ... 256 tokens, as long as such trials
take less than 1/200 of the time, of layers with what makes ready for them. A step without any is taken now and then, to know
its time. After 1,024 steps in which none were thought to pay, times of steps with drafts, what was not accepted and the doubt
of who comes are forgotten: all may have come about by chance. Where that brings none that are accepted it is done after twice
as many steps, up to 16,384.
"""

from __future__ import annotations

import numpy as np

from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.drafter import Drafts


class Lengths:
    """Over `slots`, whose drafts are of classes with these `priors` (float64): chances of standing before anything is known.
    `first_classes`: of each method, `are_layers`: whether its drafts are made when the step begins."""

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
        self._told = [0] * (2 * len(first_classes))

    @property
    def least_chance(self) -> float:
        """From which chance on a draft more paid in the step that was chosen for last; 0: all do, or nobody knows."""
        return self._native.least_chance

    def clear(self, slots: np.ndarray) -> None:
        """`slots` (int32 [n]) have no drafts any more."""
        self._native.clear(_cpu.address(slots), len(slots))

    def offer(self, slots: np.ndarray, found: Drafts, first_class: int = 0) -> None:
        """These are the drafts of `slots` (int32 [n]) where they promise more tokens than what these have; their classes count
        from `first_class`."""
        places = _cpu.address(found.token_ids), _cpu.address(found.counts), _cpu.address(found.classes)
        self._native.offer(_cpu.address(slots), len(slots), *places, first_class)

    def choose(self, slots: np.ndarray, granted: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """How many of the drafts of `slots` (int32 [n]) are to be verified, `granted[i]` (int32 [n]) at most, in a step that
        has `num_rows` rows besides, of which `num_sampled` give a token; int32 [n]."""
        chosen, granted = np.empty(len(slots), np.int32), np.ascontiguousarray(granted, np.int32)
        rows = num_rows, num_sampled
        self._native.choose(_cpu.address(slots), len(slots), _cpu.address(granted), *rows, _cpu.address(chosen))
        return chosen

    def learn(self, slots: np.ndarray, num_drafts: np.ndarray, counts: np.ndarray) -> None:
        """Learn from the rows of a step (int32 [n] each): drafts that were verified, and tokens that came of them."""
        num_drafts, counts = np.ascontiguousarray(num_drafts, np.int32), np.ascontiguousarray(counts, np.int32)
        self._native.learn(_cpu.address(slots), len(slots), _cpu.address(num_drafts), _cpu.address(counts))

    def take_verified(self) -> list[tuple[int, int]]:
        """Return for each method how many drafts were verified since the last call, and how many accepted; empty: none."""
        told = self._native.num_verified
        if told == self._told:
            return []
        new = [now - before for now, before in zip(told, self._told, strict=True)]
        self._told = told
        return list(zip(new[: len(new) // 2], new[len(new) // 2 :], strict=True))

    def tell_layers(self, slots: np.ndarray) -> None:
        """Drafts of `slots` (int32 [n]) came from another rank."""
        self._native.tell_layers(_cpu.address(slots), len(slots))

    def took(self, num_rows: int, step_ns: int, *, has_prompts: bool, has_drafts: bool, num_steps: int = 1) -> None:
        """A step of so many rows took so long, with the draft tokens for the next. `has_prompts`: rows of prompts were in it,
        or others started. It stands for `num_steps` of its kind."""
        self._native.took(has_prompts, has_drafts, num_rows, step_ns, num_steps)

    def wanted(self, slots: np.ndarray) -> np.ndarray:
        """How many drafts would pay in the next step, int32 [n]."""
        wanted = np.empty(len(slots), np.int32)
        self._native.wanted(_cpu.address(slots), len(slots), _cpu.address(wanted))
        return wanted

    def num_idle(self, slots: np.ndarray) -> int:
        """Return for how many more steps `slots` (int32 [n]) need no drafts: no try is due, or paid for."""
        return self._native.num_idle(_cpu.address(slots), len(slots))

    def wanted_by_new_requests(self) -> int:
        """Return how many are expected to pay for a sequence of which nothing is known."""
        return self._native.wanted_by_new_requests()
