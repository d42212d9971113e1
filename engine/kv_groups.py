"""Groups of layers that read the same part of a sequence: those that see all keys, and those with the same sliding window.

Used by the launcher (what the cache holds) and by the scheduler, which allocates and frees KV blocks group by group. A block of
a group is one page of the arena for each of its block tables. All pages are alike, so memory moves freely between groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class KvGroup(msgspec.Struct, frozen=True):
    """A group of layers."""

    window: int = 0  # keys that a query sees, itself included; 0: all before it
    num_tables: int = 1  # pages of a block

    def first_block(self, position: int, block_size: int) -> int:
        """Return the first block that queries from `position` on read."""
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def num_blocks(self, num_tokens: int, block_size: int, num_moving: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at a time. `num_moving`: positions from the first that
        may be computed again to the last that is dispatched."""
        num_blocks = -(-num_tokens // block_size)
        if not self.window:
            return num_blocks
        return min(num_blocks, (self.window + num_moving + 2 * block_size - 2) // block_size)


def num_moving(max_num_tokens: int, num_overlap: int) -> int:
    """Return `num_moving` of two steps in flight with at most `max_num_tokens` each."""
    return 2 * max_num_tokens + num_overlap


def num_pages(groups: Sequence[KvGroup], num_tokens: int, block_size: int, num_moving: int) -> int:
    """Return the most pages that a sequence of `num_tokens` holds at a time."""
    return sum(group.num_tables * group.num_blocks(num_tokens, block_size, num_moving) for group in groups)


def longest_sequence(groups: Sequence[KvGroup], pages: int, block_size: int, num_moving: int, limit: int) -> int:
    """Return how many tokens, at most `limit`, a sequence may have in a cache of `pages`."""
    if num_pages(groups, limit, block_size, num_moving) <= pages:
        return limit
    low, high = 0, -(-limit // block_size)  # blocks that fit, blocks that do not
    while high - low > 1:
        middle = (low + high) // 2
        if num_pages(groups, middle * block_size, block_size, num_moving) <= pages:
            low = middle
        else:
            high = middle
    return low * block_size
