"""Drafters propose the next tokens of each slot. Wrong ones cost time, never a byte: accepted tokens are those that are
sampled.

Implemented by one file for each method, used through `drafting.py`. A drafter reads the slots' tokens; what it remembers of a
slot is in its state `slots.draft_states[slot]`, or in arrays that are registered there, and can be made again.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np


class Drafts(msgspec.Struct, frozen=True):
    """Draft tokens for n slots."""

    token_ids: np.ndarray  # int32 [n, k]
    counts: np.ndarray  # int32 [n]
    classes: np.ndarray  # int32 [n, k]: how a draft token came about, of the drafter's `priors`; those of a class are as good

    @staticmethod
    def empty(num_slots: int, max_drafts: int) -> Drafts:
        shape = num_slots, max_drafts
        return Drafts(np.zeros(shape, np.int32), np.zeros(num_slots, np.int32), np.zeros(shape, np.int32))


class Drafter(Protocol):
    """One method of drafting."""

    needs_hidden: bool  # the hidden states of the trunk's last layer
    priors: np.ndarray  # float64: by class, the chance that its draft tokens are accepted, before anything is known

    @property
    def num_bytes(self) -> int:
        """Memory that the drafter takes."""

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        """Another sequence takes the slot, with these tokens (int32) and perhaps a prediction of its answer by the client."""

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        """The slot's sequence is gone, which had these tokens."""

    def known(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """A step was run: its slots (int32 [n]) and how many tokens more each has (int32 [n])."""

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        """Guesses for `slots` (int32 [n]), limits[i] (int32 [n]) at most for the i-th; valid until the next call."""

    def forget(self) -> None:
        """Forget sequences that are gone: other weights come, or the prefix cache is emptied."""
