"""Suffix decoding (arXiv 2411.04975): continues a text as earlier texts with the same ending did. These are its own earlier
parts and completed answers.

Used by the runner through `drafting.py`. The trees are native (ops/cpu/native/suffix_drafts.h). For each match of the slot's
last tokens, the path of the highest counts is drafted: at most `max_spec_factor` tokens per matched token, and while the
probability of the path by its counts is at least `min_token_prob`. The candidate with the most expected tokens wins.
"""

from __future__ import annotations

import numpy as np

from engine.config import SUFFIX_SHARED_BYTES, SpeculativeConfig
from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.native import NativeDrafter, draft_slots

_BY_LENGTH, _BY_COUNT = [0.3, 0.45, 0.65, 0.85, 0.95], [0.35, 0.7, 0.85, 1.0]  # lengths of a match; shares of the counts


class SuffixDrafter(NativeDrafter):
    """Native trees: one per slot, and one of all answers."""

    def __init__(self, config: SpeculativeConfig, slots: BatchSlots, shared_bytes: int = SUFFIX_SHARED_BYTES) -> None:
        self._trees = _cpu.SuffixDrafts(
            slots.num_slots,
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            shared_bytes,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            draft_slots(slots),
        )
        super().__init__(slots, self._trees, np.outer(_BY_LENGTH, _BY_COUNT).ravel())

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        self._trees.start(int(self._slots.draft_states[slot]), num_prompt_tokens)

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        self._trees.stop(int(self._slots.draft_states[slot]), _cpu.address(token_ids), len(token_ids))

    def forget(self) -> None:
        self._trees.forget()
