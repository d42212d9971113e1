"""The block pool: every block is in one place, references balance, and a key identifies one chain of tokens."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_keys import ROOT, hash_block, hash_blocks
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.prefix_cache import CachedBlock

BLOCK_SIZE = 4


def keys_of(token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    hash_blocks(array("i", token_ids), BLOCK_SIZE, keys, len(token_ids))
    return keys


def match(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Return the cached blocks with the beginning of these tokens."""
    return pool.prefix_cache.match(keys_of(token_ids), lambda group, num_blocks: 0).tables[0]


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Return a block table with these tokens and all of its full blocks in the index."""
    keys = keys_of(token_ids)
    block_ids = pool.allocate(len(keys))
    for index, key in enumerate(keys):
        tokens = array("i", token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]).tobytes()
        pool.insert(CachedBlock([block_ids[index]], key, keys[index - 1] if index else ROOT, tokens))
    return block_ids


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24))
def test_equal_keys_mean_equal_tokens_from_the_start(left: list[int], right: list[int]) -> None:
    for index, (left_key, right_key) in enumerate(zip(keys_of(left), keys_of(right), strict=False)):
        end = (index + 1) * BLOCK_SIZE
        assert (left_key == right_key) == (left[:end] == right[:end])


def test_keys_grow_with_the_tokens() -> None:
    tokens = array("i", range(10))
    keys: list[bytes] = []
    hash_blocks(tokens, BLOCK_SIZE, keys, 5)
    assert len(keys) == 1
    hash_blocks(tokens, BLOCK_SIZE, keys, 10)
    assert keys == keys_of(list(range(10)))
    assert keys[1] == hash_block(keys[0], tokens[4:8].tobytes())


def test_extra_keys_tell_blocks_with_equal_tokens_apart() -> None:
    """The same tokens with another image are no hit."""
    tokens = array("i", [1, 2, 3, 4]).tobytes()
    assert len({hash_block(ROOT, tokens), hash_block(ROOT, tokens, (b"image",)), hash_block(ROOT, tokens, ("image",))}) == 3


def test_a_released_prefix_is_found_and_shared() -> None:
    pool = BlockPool(8)
    block_ids = fill(pool, list(range(12)))
    pool.release(block_ids)
    assert pool.num_free == 8
    found = match(pool, [*range(8), 99, 99, 99, 99])
    assert found == block_ids[:2]
    assert pool.num_unused(found) == 2
    pool.acquire(found)
    assert pool.num_unused(found) == 0
    assert pool.num_free == 6


def test_least_recently_used_chain_is_evicted_backwards() -> None:
    pool = BlockPool(6)
    old, new = list(range(12)), list(range(100, 112))
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    pool.allocate(2)
    assert pool.prefix_cache.evicted_keys == [keys_of(old)[2], keys_of(old)[1]]
    assert len(match(pool, old)) == 1
    assert len(match(pool, new)) == 3


def test_blocks_in_use_are_not_evicted() -> None:
    pool = BlockPool(4)
    used = fill(pool, list(range(8)))
    assert set(pool.allocate(2)).isdisjoint(used)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_the_same_tokens_twice_are_indexed_once() -> None:
    pool = BlockPool(4)
    first = fill(pool, list(range(4)))
    second = fill(pool, list(range(4)))
    assert match(pool, list(range(4))) == first
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, len(pool.prefix_cache)) == (4, 1)


def test_clear_forgets_the_index_but_not_the_users() -> None:
    pool = BlockPool(4)
    used = fill(pool, list(range(4)))
    pool.release(fill(pool, list(range(50, 58))))
    pool.clear()
    assert (len(pool.prefix_cache), pool.num_free) == (0, 3)
    assert match(pool, list(range(4))) == []
    pool.release(used)
    assert pool.num_free == 4
    assert pool.prefix_cache.evicted_keys == []


class PoolMachine(RuleBasedStateMachine):
    """State machine that runs any sequence of allocations, hits, releases and clears and checks the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[tuple[list[int], list[int]]] = []  # (tokens, block ids)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def start(self, token_ids: list[int]) -> None:
        keys = keys_of(token_ids)
        hits = match(self.pool, token_ids)
        num_new = -(-len(token_ids) // BLOCK_SIZE) - len(hits)
        if num_new + self.pool.num_unused(hits) > self.pool.num_free:
            return
        self.pool.acquire(hits)
        block_ids = hits + self.pool.allocate(num_new)
        for index in range(len(hits), len(keys)):
            tokens = array("i", token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]).tobytes()
            self.pool.insert(CachedBlock([block_ids[index]], keys[index], keys[index - 1] if index else ROOT, tokens))
        self.tables.append((token_ids, block_ids))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index)[1])

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def references_are_the_tables(self) -> None:
        users = Counter(block_id for _, block_ids in self.tables for block_id in block_ids)
        assert self.pool.num_free == self.pool.num_pages - len(users)
        assert [users[block_id] for block_id in range(self.pool.num_pages + 1)] == self.pool._num_references

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        used = {block_id for _, block_ids in self.tables for block_id in block_ids}
        vacant, cached = self.pool._vacant, list(self.pool.prefix_cache._evictable)
        assert sorted([*used, *vacant, *cached]) == list(range(1, self.pool.num_pages + 1))
        indexed = {entry.block_ids[0] for entry in self.pool.prefix_cache}
        assert indexed.isdisjoint(vacant)
        assert indexed >= set(cached)

    @invariant()
    def the_index_holds_whole_chains(self) -> None:
        entries = {entry.key: entry for entry in self.pool.prefix_cache}
        for entry in entries.values():
            assert entry.key == hash_block(entry.parent, entry.token_ids)

    @invariant()
    def shared_blocks_hold_equal_tokens(self) -> None:
        chains: dict[int, list[int]] = {}
        for token_ids, block_ids in self.tables:
            for index, block_id in enumerate(block_ids):
                chain = token_ids[: (index + 1) * BLOCK_SIZE]
                assert chains.setdefault(block_id, chain) == chain


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase
