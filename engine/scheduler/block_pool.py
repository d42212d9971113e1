"""The KV blocks: references to them, and which one is evicted next. Contains the prefix cache (`prefix_cache.py`).

Used by the scheduler process alone, which owns every block table. Knows nothing of requests, processes or devices.

A block is in exactly one of three places:

    used       num_references > 0: in the block table of one or more sequences
    cached     no references, but in the prefix cache: evicted in LRU order when `vacant` runs out
    vacant     no references and not cached

Block ids start at 1: block 0 of the arena is the dummy block that padded rows write to, and belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.scheduler.prefix_cache import CachedBlock, PrefixCache


class BlockPool:
    """Reference counts of all blocks, and the prefix cache of full ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self._num_references = [0] * (num_blocks + 1)
        self._vacant = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: vacant ones and unused cached ones."""
        return len(self._vacant) + self.prefix_cache.num_evictable

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are free now and would not be after `acquire`."""
        return sum(map(self.prefix_cache.is_evictable, block_ids))

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block of a match."""
        for block_id in block_ids:
            self._num_references[block_id] += 1
            self.prefix_cache.reference(block_id)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return `num_blocks` new blocks with one reference each; evict the least recently used cached ones if needed."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._vacant.pop() if self._vacant else self.prefix_cache.evict()
            self._num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a block table, from its end, so that a chain is evicted from its end."""
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            assert self._num_references[block_id] >= 0, f"block {block_id} released twice"
            if not self._num_references[block_id] and not self.prefix_cache.unreference(block_id):
                self._vacant.append(block_id)

    def insert(self, entry: CachedBlock) -> bool:
        """Put a used block into the prefix cache. Return False if its tokens are already cached in another block."""
        assert self._num_references[entry.block_id] > 0, f"block {entry.block_id} indexed while free"
        return self.prefix_cache.insert(entry)

    def clear(self) -> None:
        """Empty the prefix cache; blocks in use stay in use."""
        self._vacant.extend(self.prefix_cache.clear())
