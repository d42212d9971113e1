"""A text goes on as others did that ended as it does now: its own earlier parts, and answers that are complete (SuffixDecoding,
arXiv 2411.04975).

Used by the runner through `drafting.py`. The trees are native (ops/cpu/native/suffix_drafts.h). For each part that the slot's
last tokens match, the path of the highest counts is drafted, as long as `max_spec_factor` for each token matched, and as the
chance of the whole by the counts is `min_token_prob`; of these drafts the one with the most tokens to be expected is taken.
"""

from __future__ import annotations

import numpy as np

from engine.config import SUFFIX_SHARED_BYTES, SpeculativeConfig
from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.native import NativeDrafter, draft_slots

_BY_LENGTH, _BY_COUNT = [0.3, 0.45, 0.65, 0.85, 0.95], [0.35, 0.7, 0.85, 1.0]  # of a match; of what followed


class SuffixDrafter(NativeDrafter):
    """Native trees: one of each slot, one of all answers."""

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
