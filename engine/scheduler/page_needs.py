"""Pages of the KV cache that sequences need, by group of layers. Pure decisions.

Used by `policy.py`. Layers that see all keys get the blocks of a whole prompt at its admission. Layers with a window get theirs
chunk by chunk, as blocks behind the window are freed; what they will hold is kept free for them until the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_groups import num_moving
from engine.scheduler.limits import Limits
from engine.scheduler.prefix_cache import Prefix
from engine.scheduler.sequence import Sequence


class PageNeeds:
    """Needs of sequences within `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._groups = limits.groups
        self._lone_pages = limits.groups[0].num_tables if len(limits.groups) == 1 else 0
        windowed = [(number, group) for number, group in enumerate(limits.groups) if group.window]
        self.has_windows = bool(windowed)
        moving = num_moving(limits.max_tokens, limits.num_overlap)
        self._windowed = [(number, group, group.num_blocks(1 << 40, self._size, moving)) for number, group in windowed]

    def new(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the pages that a running sequence lacks for `num_tokens` positions."""
        num_blocks = -(-num_tokens // self._size)
        if self._lone_pages:
            return max(0, num_blocks - len(sequence.tables[0])) * self._lone_pages
        return sum(
            (num_blocks - len(table)) * group.num_tables
            for table, group in zip(sequence.tables, self._groups, strict=True)
            if len(table) < num_blocks
        )

    def for_admission(self, sequence: Sequence, prefix: Prefix) -> int:
        """Return the pages that a waiting sequence needs beside its cached ones, until its tokens are computed."""
        num_blocks = -(-sequence.num_tokens // self._size)
        total = sum(group.num_tables for group in self._groups if not group.window) * (num_blocks - prefix.num_blocks)
        for _, group, most in self._windowed:
            first = self._limits.first_needed(group, prefix.num_blocks)
            total += group.num_tables * max(0, min(num_blocks, first + most) - prefix.num_blocks)
        return total

    def kept_for(self, running: Iterable[Sequence]) -> int:
        """Return the pages that running sequences still need until their prompts are computed."""
        return sum(map(self._kept, running)) if self._windowed else 0

    def _kept(self, sequence: Sequence) -> int:
        if sequence.num_computed >= sequence.num_tokens - 1:
            return 0
        num_blocks = -(-sequence.num_tokens // self._size)
        return sum(
            group.num_tables * max(0, min(num_blocks, sequence.num_freed[number] + most) - len(sequence.tables[number]))
            for number, group, most in self._windowed
        )

    def num_tokens_within(self, sequence: Sequence, start: int, num_free_pages: int) -> int:
        """Return how many tokens of a running sequence's prompt from `start` on find blocks."""
        number = self._windowed[0][0]  # all groups with windows have as many
        num_new_blocks = num_free_pages // sum(group.num_tables for _, group, _ in self._windowed)
        return (len(sequence.tables[number]) + num_new_blocks) * self._size - start
