"""Drafters propose the next tokens of each slot. Wrong drafts cost time but never change an answer: only sampled tokens are
accepted.

One file implements each method; all are used through `drafting.py`. A drafter reads the tokens of the slots. Its own state of a
slot is at `slots.draft_states[slot]`, or in arrays registered there, and can be rebuilt.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np


class Drafts(msgspec.Struct, frozen=True):
    """Draft tokens for n slots."""

    token_ids: np.ndarray  # int32 [n, k]
    counts: np.ndarray  # int32 [n]
    classes: np.ndarray  # int32 [n, k]: index into the drafter's `priors`; drafts of one class are equally likely

    @staticmethod
    def empty(num_slots: int, max_drafts: int) -> Drafts:
        shape = num_slots, max_drafts
        return Drafts(np.zeros(shape, np.int32), np.zeros(num_slots, np.int32), np.zeros(shape, np.int32))


class Drafter(Protocol):
    """Method of drafting."""

    needs_hidden: bool  # whether it reads hidden states of the trunk's last layer
    priors: np.ndarray  # float64: acceptance rate of each class before anything is learned

    @property
    def num_bytes(self) -> int:
        """Return the memory that the drafter uses."""

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        """Start a sequence in the slot, with these tokens (int32) and an optional prediction of its answer by the client."""

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        """End the slot's sequence, which had these tokens."""

    def known(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Record a step: its slots (int32 [n]) and their numbers of new tokens (int32 [n])."""

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        """Return draft tokens for `slots` (int32 [n]), at most limits[i] (int32 [n]) for the i-th; valid until the next
        call."""

    def forget(self) -> None:
        """Forget ended sequences, after new weights or a cleared prefix cache."""
