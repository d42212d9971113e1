"""The KV blocks: references to them, and which one is evicted next. Contains the prefix cache (`prefix_cache.py`).

Used by the scheduler process alone, which owns every block table. Knows nothing of requests, processes or devices.

A block belongs to a group of layers (`engine/kv_groups.py`) and consists of one or more pages of the arena, one for each block
table of the group; its id is that of its first page. A block is in exactly one of three places:

    used       num_references > 0: in the block table of one or more sequences
    cached     no references, but in the prefix cache: evicted in LRU order when `vacant` runs out
    vacant     no references and not cached: its pages are free for a block of any group

Page ids start at 1: page 0 of the arena is the dummy block that padded rows write to, and belongs to no sequence. In a block
table it stands for a block that the sequence does not need any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv_groups import KvGroup
from engine.scheduler.prefix_cache import CachedBlock, PrefixCache
from engine.scheduler.states import StatePool

NO_BLOCK = 0


class BlockPool:
    """Reference counts of all blocks, and the prefix cache of full ones. `num_free` and `num_unused` count pages. `states`: of
    models with recurrent layers; states are kept under the keys of cached blocks."""

    def __init__(self, num_pages: int, groups: Sequence[KvGroup] = (KvGroup(),), states: StatePool | None = None) -> None:
        self.num_pages = num_pages
        self.states = states
        self.prefix_cache = PrefixCache(groups)
        self._pages_per_block = [group.num_tables for group in groups]
        self._num_references = [0] * (num_pages + 1)
        self._pages: dict[int, list[int]] = {}  # of blocks with more than one, by id
        self._vacant = list(range(num_pages, 0, -1))
        self._num_evictable = 0  # pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: vacant ones and those of unused cached blocks."""
        return len(self._vacant) + self._num_evictable

    def pages(self, block_id: int) -> Sequence[int]:
        """Return the pages of a block, in the order of the group's tables."""
        return self._pages.get(block_id) or (block_id,)

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """Return how many pages of these blocks are free now and would not be after `acquire`."""
        return sum(self._size(block_id) for block_id in block_ids if self.prefix_cache.is_evictable(block_id))

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block of a match."""
        for block_id in block_ids:
            if block_id:
                self._num_references[block_id] += 1
                if self.prefix_cache.reference(block_id):
                    self._num_evictable -= self._size(block_id)

    def allocate(self, num_blocks: int, group: int = 0) -> list[int]:
        """Return `num_blocks` new blocks of a group with one reference each; evict the least recently used cached ones if
        needed."""
        size, vacant = self._pages_per_block[group], self._vacant
        assert num_blocks * size <= self.num_free, f"{num_blocks * size} blocks wanted, {self.num_free} free"
        block_ids = []
        for _ in range(num_blocks):
            while len(vacant) < size:
                self._evict()
            block_id = vacant.pop()
            if size > 1:
                self._pages[block_id] = [block_id, *(vacant.pop() for _ in range(size - 1))]
            self._num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int], *, is_behind: bool = False) -> None:
        """Drop one reference to each block of a block table, from its end, so that a chain is evicted from its end.
        `is_behind`: they fell behind a window."""
        for block_id in reversed(block_ids):
            if not block_id:
                continue
            self._num_references[block_id] -= 1
            assert self._num_references[block_id] >= 0, f"block {block_id} released twice"
            if self._num_references[block_id]:
                continue
            if self.prefix_cache.unreference(block_id, is_behind=is_behind):
                self._num_evictable += self._size(block_id)
            else:
                self._vacate(block_id)

    def insert(self, entry: CachedBlock) -> bool:
        """Put used blocks into the prefix cache. Return False if their tokens are already cached in other blocks."""
        assert all(self._num_references[block_id] > 0 for block_id in entry.block_ids if block_id), "indexed while free"
        return self.prefix_cache.insert(entry)

    def clear(self) -> None:
        """Empty the prefix cache; blocks in use stay in use."""
        for block_id in self.prefix_cache.clear():
            self._vacate(block_id)
        self._num_evictable = 0
        if self.states is not None:
            self.states.clear()

    def _size(self, block_id: int) -> int:
        pages = self._pages.get(block_id)
        return len(pages) if pages else 1

    def _evict(self) -> None:
        num_before = len(self.prefix_cache.evicted_keys)
        for block_id in self.prefix_cache.evict():
            self._num_evictable -= self._size(block_id)
            self._vacate(block_id)
        if self.states is not None:
            for key in self.prefix_cache.evicted_keys[num_before:]:
                self.states.drop(key)

    def _vacate(self, block_id: int) -> None:
        pages = self._pages.pop(block_id, None)
        if pages is None:
            self._vacant.append(block_id)
        else:
            self._vacant.extend(reversed(pages))
