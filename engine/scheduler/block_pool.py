"""The KV blocks: who uses them, which hold a reusable prefix, and which goes next when room is needed.

Used by the scheduler process alone, which owns every block table. Nothing here knows of requests, processes or devices.

A block is in exactly one of three places:

    used       num_references > 0: in the block table of one or more sequences
    cached     no references, but in the prefix index: evicted in LRU order when `vacant` runs out
    vacant     no references and nothing worth keeping

The index is by the chained keys of `engine/block_keys.py`: the longest cached prefix is found by walking down a prompt's keys.
Block ids start at 1: block 0 of the arena is the dummy block that padded rows write to, and is nobody's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from engine.messages.cache import ExtraKeys


class CachedBlock(msgspec.Struct, frozen=True):
    """An entry of the prefix index: a block whose KV is computed for exactly these tokens after exactly that parent."""

    block_id: int
    key: bytes
    parent: bytes
    token_ids: bytes  # int32 [block_size]
    extra: ExtraKeys = ()  # what the key holds besides


class BlockPool:
    """Reference counts of all blocks, the prefix index over the full ones, and LRU eviction."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.generation = 0  # of the prefix index; a block table of an older one is not indexed any more
        self.evicted_keys: list[bytes] = []  # since the caller last took them
        self._num_references = [0] * (num_blocks + 1)
        self._vacant = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest use first
        self._index: dict[bytes, CachedBlock] = {}
        self._entry_of: dict[int, CachedBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: vacant ones and unused cached ones."""
        return len(self._vacant) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix index, used or not."""
        return len(self._index)

    def entries(self) -> Iterator[CachedBlock]:
        """The prefix index in the order in which it grew."""
        return iter(self._index.values())

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The block ids of the longest indexed prefix of `keys`. Takes no references."""
        block_ids = []
        for key in keys:
            entry = self._index.get(key)
            if entry is None:
                break
            block_ids.append(entry.block_id)
        return block_ids

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free now, and would not be after `acquire`."""
        return sum(block_id in self._cached for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Take one more reference on each block of a match."""
        for block_id in block_ids:
            self._num_references[block_id] += 1
            self._cached.pop(block_id, None)

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` fresh blocks with one reference each; the least recently used cached ones are evicted where needed."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._vacant.pop() if self._vacant else self._evict()
            self._num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference on each block of a block table, deepest first, so that a chain is evicted from its end."""
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            assert self._num_references[block_id] >= 0, f"block {block_id} released twice"
            if self._num_references[block_id]:
                continue
            if block_id in self._entry_of:
                self._cached[block_id] = None
            else:
                self._vacant.append(block_id)

    def insert(self, entry: CachedBlock) -> bool:
        """Put a used block into the index. False where its tokens are there already, in another block (which is then kept)."""
        assert self._num_references[entry.block_id] > 0, f"block {entry.block_id} indexed while free"
        if entry.key in self._index:
            return False
        self._index[entry.key] = entry
        self._entry_of[entry.block_id] = entry
        return True

    def clear(self) -> None:
        """Forget the whole prefix index; blocks in use stay in use."""
        self.generation += 1
        self._index.clear()
        self._entry_of.clear()
        self.evicted_keys.clear()
        self._vacant.extend(self._cached)
        self._cached.clear()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        entry = self._entry_of.pop(block_id)
        del self._index[entry.key]
        self.evicted_keys.append(entry.key)
        return block_id
