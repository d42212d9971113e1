"""The prefix cache: an index from chained block keys to blocks with their KV, and the order in which they are evicted.

Part of `block_pool.py`, in the scheduler process. Keys come from `engine/block_keys.py`; the longest cached prefix is found by
following a prompt's keys. Indexed blocks without a reference are evictable, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from engine.messages.cache import ExtraKeys


class CachedBlock(msgspec.Struct, frozen=True):
    """An entry of the index: a block with the KV of exactly these tokens after exactly that parent."""

    block_id: int
    key: bytes
    parent: bytes
    token_ids: bytes  # int32 [block_size]
    extra: ExtraKeys = ()  # everything else that the key covers


class PrefixCache:
    """Index over full blocks, and the evictable ones among them."""

    def __init__(self) -> None:
        self.generation = 0  # a block table of an older generation is no longer indexed
        self.evicted_keys: list[bytes] = []  # since the caller last took them
        self._entries: dict[bytes, CachedBlock] = {}
        self._entry_of: dict[int, CachedBlock] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest use first

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CachedBlock]:
        """Yield the entries in the order in which the index grew."""
        return iter(self._entries.values())

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the block ids of the longest indexed prefix of `keys`."""
        block_ids = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            block_ids.append(entry.block_id)
        return block_ids

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def insert(self, entry: CachedBlock) -> bool:
        """Index a block in use. Return False if its tokens are already indexed in another block (which is kept)."""
        if entry.key in self._entries:
            return False
        self._entries[entry.key] = entry
        self._entry_of[entry.block_id] = entry
        return True

    def reference(self, block_id: int) -> None:
        """Note a reference to a block: it cannot be evicted."""
        self._evictable.pop(block_id, None)

    def unreference(self, block_id: int) -> bool:
        """Note that a block has no reference any more. Return False if it is not indexed, and so not worth keeping."""
        if block_id not in self._entry_of:
            return False
        self._evictable[block_id] = None
        return True

    def evict(self) -> int:
        """Remove the least recently used evictable block from the index and return its id."""
        block_id, _ = self._evictable.popitem(last=False)
        entry = self._entry_of.pop(block_id)
        del self._entries[entry.key]
        self.evicted_keys.append(entry.key)
        return block_id

    def clear(self) -> list[int]:
        """Empty the index and return the blocks that were evictable; blocks in use stay in use."""
        evictable = list(self._evictable)
        self.generation += 1
        self._entries.clear()
        self._entry_of.clear()
        self.evicted_keys.clear()
        self._evictable.clear()
        return evictable
