"""Limits of a step, and what follows from them for a sequence. Pure decisions.

Used by the scheduler process, in all modules that decide about sequences.
"""

from __future__ import annotations

import msgspec

from engine.kv_groups import KvGroup
from engine.scheduler.sequence import Sequence
from engine.scheduler.states import StateRules


class Limits(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_tokens: int  # max_num_batched_tokens
    max_running: int  # batch slots
    max_start_bytes: int  # total of SlotStarts, which must fit one ring record
    max_result_bytes: int  # of prompt log-probabilities or pooled output, which must fit the record of a StepResult
    block_size: int
    has_prefix_cache: bool
    max_drafts: int = 0  # their results must fit a record, too
    num_overlap: int = 0  # positions that are computed again when a sequence continues from the cache
    are_prompts_whole: bool = False  # each prompt is computed in one step
    mm_chunk_tokens: int = 0  # target size of chunks of a prompt with media; 0: max_tokens
    long_prefill_tokens: int = 0  # prompts with more left to compute are long, and get at most this in a step; 0: see `is_long`
    max_partial_prefills: int = 0  # prompts that are partly computed; 0: no limit
    max_long_prefills: int = 1  # long prompts per source that are computed at the same time
    groups: tuple[KvGroup, ...] = (KvGroup(),)  # of layers; each has block tables of its own
    states: StateRules | None = None  # of models with recurrent layers

    @property
    def pages_per_block(self) -> int:
        """Pages of a block in all layers."""
        return sum(group.num_tables for group in self.groups)

    def first_needed(self, group: KvGroup, num_blocks: int) -> int:
        """Return the first block that a group needs to continue after `num_blocks` cached blocks."""
        return group.first_block(self.first_position(num_blocks * self.block_size), self.block_size)

    def first_position(self, num_tokens: int) -> int:
        """Return the position at which a sequence continues when its first `num_tokens` are cached."""
        return max(0, num_tokens - self.num_overlap)

    def is_decoding(self, sequence: Sequence) -> bool:
        """Return whether its answer has begun and only its newest token is left to compute."""
        num_tokens = sequence.num_tokens
        return num_tokens > sequence.num_prompt_tokens and num_tokens - sequence.num_computed <= 1 + self.num_overlap

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a prompt with this many tokens left is long: by default, if they do not fit one step."""
        return num_tokens > (self.long_prefill_tokens or self.max_tokens)
