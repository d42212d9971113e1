"""Prompt lookup (Saxena, 2023): finds the longest match of a slot's last tokens among its earlier ones, and drafts the tokens
that followed it.

Used by the runner through `drafting.py`. The index of each slot and the search are native (ops/cpu/native/drafts.h).
"""

from __future__ import annotations

import numpy as np

from engine.config import SpeculativeConfig
from ops import _cpu
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.native import NativeDrafter, draft_slots


class NgramDrafter(NativeDrafter):
    """Native index over the tokens of each slot."""

    def __init__(self, config: SpeculativeConfig, slots: BatchSlots) -> None:
        lookup = config.prompt_lookup_min, config.prompt_lookup_max
        priors = 1 - 0.6 / (1 + np.arange(_cpu.NgramDrafts.NUM_CLASSES))  # longer matches are likelier
        self._index = _cpu.NgramDrafts(slots.num_slots, *lookup, draft_slots(slots))
        super().__init__(slots, self._index, priors)

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        state = int(self._slots.draft_states[slot])
        self._index.start(state, num_prompt_tokens, _cpu.address(prediction), len(prediction))
