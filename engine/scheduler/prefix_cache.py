"""The prefix cache: an index from chained block keys to blocks with their KV, and the order in which they are evicted.

Part of `block_pool.py`, in the scheduler process. Keys come from `engine/block_keys.py`; the longest cached prefix is found by
following a prompt's keys. Indexed blocks without a reference are evictable, the least recently used first.

An entry has a block for each group of layers. A prefix needs all blocks of layers that see all keys, but only the last ones of
layers with a window; others may have been evicted. The first group, which sees most, decides whether an entry exists: with its
block all blocks of the entry leave the index.

Blocks that fell behind a window are of use only for a prefix that ends within the next window. They are evicted before all
others, unless a prefix has used them or they are the last window of a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.kv_groups import KvGroup
from engine.messages.cache import ExtraKeys


class CachedBlock(msgspec.Struct, frozen=True):
    """An entry of the index: blocks with the KV of exactly these tokens after exactly that parent."""

    block_ids: list[int]  # of each group; 0: evicted
    key: bytes
    parent: bytes
    token_ids: bytes  # int32 [block_size]
    extra: ExtraKeys = ()  # everything else that the key covers


class Prefix(msgspec.Struct, frozen=True):
    """A cached prefix of `num_blocks` blocks: those of each group, 0 where none is needed."""

    num_blocks: int
    tables: list[list[int]]
    num_known_blocks: int = 0  # leading blocks in the index, with or without all that a sequence needs to continue


class PrefixCache:
    """Index over full blocks, and the evictable ones among them."""

    def __init__(self, groups: Sequence[KvGroup] = (KvGroup(),)) -> None:
        self.generation = 0  # a block table of an older generation is no longer indexed
        self.evicted_keys: list[bytes] = []  # since the caller last took them
        self._groups = groups
        self._entries: dict[bytes, CachedBlock] = {}
        self._entry_of: dict[int, CachedBlock] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest use first
        self._behind: OrderedDict[int, None] = OrderedDict()  # the same for blocks behind a window, evicted before
        self._reused: set[int] = set()  # blocks that a prefix has used
        self._num_blocks = [0 for _ in groups]  # indexed ones of each group

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CachedBlock]:
        """Yield the entries in the order in which the index grew."""
        return iter(self._entries.values())

    @property
    def num_pages(self) -> int:
        """Pages of all indexed blocks."""
        return sum(count * group.num_tables for count, group in zip(self._num_blocks, self._groups, strict=True))

    def match(
        self, keys: Sequence[bytes], first_needed: Callable[[KvGroup, int], int], shorten: Callable[[int], int] | None = None
    ) -> Prefix:
        """Return the longest usable prefix of `keys`. `first_needed`: the first block that a group needs, if it continues after
        this number of blocks; `shorten`: how many of them may be used at most."""
        entries: list[CachedBlock | None] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None and not self._groups[0].window:
                break
            entries.append(entry)
        num_blocks, found = len(entries), -1
        while found != num_blocks:  # until nothing is missing
            found = num_blocks
            num_blocks = num_blocks if shorten is None else shorten(num_blocks)
            for number, group in enumerate(self._groups):
                if group.window:
                    num_blocks = _with_whole_window(entries, number, num_blocks, group, first_needed)
        tables = []
        for number, group in enumerate(self._groups):
            first = first_needed(group, num_blocks)
            tables.append([0] * first + [entry.block_ids[number] for entry in entries[first:num_blocks] if entry is not None])
        return Prefix(num_blocks, tables, len(entries))

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable or block_id in self._behind

    def insert(self, entry: CachedBlock) -> bool:
        """Index blocks in use. Return False if their tokens are already indexed in other blocks, which are kept, but for those
        that were evicted."""
        known = self._entries.get(entry.key)
        if known is None:
            self._entries[entry.key] = entry
            for number, block_id in enumerate(entry.block_ids):
                if block_id:
                    self._entry_of[block_id] = entry
                    self._num_blocks[number] += 1
            return True
        for number, block_id in enumerate(entry.block_ids):
            if block_id and not known.block_ids[number]:
                known.block_ids[number] = block_id
                self._entry_of[block_id] = known
                self._num_blocks[number] += 1
        return False

    def reference(self, block_id: int) -> bool:
        """Note that a prefix uses a block: it cannot be evicted. Return whether it could be until now."""
        self._reused.add(block_id)
        return self._withdraw(block_id)

    def _withdraw(self, block_id: int) -> bool:
        """Take a block from the evictable ones. Return whether it was one."""
        for blocks in (self._evictable, self._behind):
            if block_id in blocks:
                del blocks[block_id]
                return True
        return False

    def unreference(self, block_id: int, *, is_behind: bool = False) -> bool:
        """Note that a block has no reference any more. Return False if it is not indexed, and so not worth keeping.
        `is_behind`: it fell behind a window."""
        if block_id not in self._entry_of:
            return False
        blocks = self._behind if is_behind and block_id not in self._reused else self._evictable
        blocks[block_id] = None
        return True

    def evict(self) -> list[int]:
        """Remove the least recently used evictable block from the index. Return the blocks that nothing holds any more: this
        one and, if it is the first of its entry, the evictable others."""
        block_id, _ = (self._behind or self._evictable).popitem(last=False)
        entry = self._entry_of.pop(block_id)
        self._reused.discard(block_id)
        number = entry.block_ids.index(block_id)
        self._num_blocks[number] -= 1
        if number:
            entry.block_ids[number] = 0
            return [block_id]
        del self._entries[entry.key]
        self.evicted_keys.append(entry.key)
        vacated = [block_id]
        for number, other in enumerate(entry.block_ids[1:], 1):
            if other:
                self._num_blocks[number] -= 1
                del self._entry_of[other]
                self._reused.discard(other)
                if self._withdraw(other):
                    vacated.append(other)
        return vacated

    def clear(self) -> list[int]:
        """Empty the index and return the blocks that were evictable; blocks in use stay in use."""
        evictable = [*self._evictable, *self._behind]
        self.generation += 1
        self._entries.clear()
        self._entry_of.clear()
        self.evicted_keys.clear()
        self._evictable.clear()
        self._behind.clear()
        self._reused.clear()
        self._num_blocks = [0 for _ in self._groups]
        return evictable


def _with_whole_window(
    entries: Sequence[CachedBlock | None],
    number: int,
    num_blocks: int,
    group: KvGroup,
    first_needed: Callable[[KvGroup, int], int],
) -> int:
    """Return the largest number of blocks, at most `num_blocks`, with all those before its end that the group needs."""
    place = num_blocks
    while place > first_needed(group, num_blocks):
        place -= 1
        entry = entries[place]
        if entry is None or not entry.block_ids[number]:
            num_blocks = place
    return num_blocks
