"""Base of the native drafters, which read only the tokens of slots. Used in this folder."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.drafter import Drafts


class NativeDrafts(Protocol):
    """Native index of draft tokens (ops/cpu/native/drafts.h)."""

    @property
    def num_bytes(self) -> int: ...

    def known(self, slots: int, count: int) -> None: ...

    def propose(self, slots: int, count: int, limits: int, k: int, drafts: int, counts: int, classes: int) -> None: ...


class NativeDrafter:
    """`Drafter` without `start`. All slots of a step are one call."""

    needs_hidden = False

    def __init__(self, slots: BatchSlots, drafts: NativeDrafts, priors: np.ndarray) -> None:
        self.priors = priors
        self._slots = slots
        self._drafts = drafts
        self._found = Drafts.empty(slots.num_slots, slots.drafts.shape[1])  # at a fixed address
        found = self._found
        self._places = _cpu.address(found.token_ids), _cpu.address(found.counts), _cpu.address(found.classes)

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        pass

    @property
    def num_bytes(self) -> int:
        """Return the memory that the drafter uses."""
        return self._drafts.num_bytes

    def known(self, slots: np.ndarray, counts: np.ndarray) -> None:
        self._drafts.known(_cpu.address(slots), len(slots))

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        found, num_slots = self._found, len(slots)
        self._drafts.propose(_cpu.address(slots), num_slots, _cpu.address(limits), found.token_ids.shape[1], *self._places)
        return Drafts(found.token_ids[:num_slots], found.counts[:num_slots], found.classes[:num_slots])

    def forget(self) -> None:
        pass


def draft_slots(slots: BatchSlots) -> _cpu.DraftSlots:
    """Return where native drafters find the slots' tokens."""
    token_ids, num_tokens, states = (_cpu.address(each) for each in (slots.token_ids, slots.num_tokens, slots.draft_states))
    return _cpu.DraftSlots(token_ids, slots.token_ids.shape[1], num_tokens, states)
