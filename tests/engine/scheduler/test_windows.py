"""Block tables by groups of layers: blocks behind a window are freed, and nothing that is still read ever is."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from engine.block_keys import ROOT
from engine.checkpoint.kv_cache_spec import KVCacheSpec, LayerPlace, place_layers
from engine.kv_groups import KvGroup, longest_sequence, num_pages
from engine.kv_groups import num_moving as moving_of
from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored
from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.limits import Limits
from engine.scheduler.page_needs import PageNeeds
from engine.scheduler.prefix_cache import CachedBlock, Prefix
from tests.engine.scheduler.sequences import make_limits, make_sample
from tests.engine.scheduler.simulation import Simulation, simulate
from tests.engine.scheduler.test_block_pool import BLOCK_SIZE, keys_of
from tests.engine.scheduler.test_drafts import DRAFTS, LAYERS, submit_all
from tests.engine.scheduler.test_policy import PROMPTS, World

MIXED = (KvGroup(0, 1), KvGroup(10, 2))
TWO_WINDOWS = (KvGroup(0, 2), KvGroup(13, 1), KvGroup(3, 2))
SHORTEST = (KvGroup(0, 1), KvGroup(1, 1))
ONLY_WINDOWS = (KvGroup(9, 1),)
BOTH_WINDOWS = (KvGroup(17, 1), KvGroup(4, 1))
ALL_GROUPS = [MIXED, TWO_WINDOWS, SHORTEST, ONLY_WINDOWS, BOTH_WINDOWS]
NAMES = ["mixed", "two-windows", "window-of-1", "only-windows", "both-windows"]


# ------------------------------------------------------------------------------------------------------------ declaration


def test_layers_of_gemma_3_share_pages() -> None:
    count, groups, places = place_layers(([512] * 5 + [0]) * 4 + [512] * 2)
    assert (count, groups) == (4, (KvGroup(0, 1), KvGroup(512, 6)))
    assert [place.table for place in places[5::6]] == [0] * 4
    assert len(set(places)) == 26, "each layer has its own memory"


@pytest.mark.parametrize(
    ("windows", "count", "tables"),
    [([0] * 28, 28, [1]), ([4096] * 32, 32, [1]), ([128, 0] * 12, 12, [1, 1]), ([9] * 3 + [5] * 2, 1, [3, 2])],
    ids=["full", "only-windows", "alternating", "two-windows"],
)
def test_few_block_tables(windows: list[int], count: int, tables: list[int]) -> None:
    found, groups, places = place_layers(windows)
    assert len(set(places)) == len(windows)
    assert (found, [group.num_tables for group in groups]) == (count, tables)


def test_layer_that_shares_an_earlier_one_stores_nothing() -> None:
    count, groups, places = place_layers([8, 0, 8, 0], sources=[0, 1, 0, 1])
    assert (count, [group.num_tables for group in groups]) == (1, [1, 1])
    assert places == (LayerPlace(1, 0), LayerPlace(0, 0)) * 2
    _, groups, _ = place_layers([8, 0], sources=[0, 0])
    assert groups == (KvGroup(0, 1),), "a layer keeps what the layer that shares it reads"


# ------------------------------------------------------------------------------------------------------------------- pool


def fill(pool: BlockPool, token_ids: list[int], num_groups: int = 2) -> list[list[int]]:
    """Return block tables with these tokens, all of them in the index."""
    keys = keys_of(token_ids)
    tables = [pool.allocate(len(keys), group) for group in range(num_groups)]
    for index, key in enumerate(keys):
        tokens = array("i", token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]).tobytes()
        pool.insert(CachedBlock([table[index] for table in tables], key, keys[index - 1] if index else ROOT, tokens))
    return tables


def match(pool: BlockPool, token_ids: list[int], limits: Limits) -> Prefix:
    return pool.prefix_cache.match(keys_of(token_ids), limits.first_needed)


def test_hit_needs_only_the_last_window() -> None:
    limits = replace(make_limits(), groups=(KvGroup(0), KvGroup(6)))
    pool, tokens = BlockPool(12, limits.groups), list(range(20))
    full, windowed = fill(pool, tokens)
    pool.release(windowed)  # as if all were behind the window, in the order of their use
    pool.allocate(4)  # the last two are vacant; evicts the last two blocks of the window
    assert match(pool, tokens, limits).num_blocks == 3
    assert match(pool, tokens, limits).tables == [full[:3], [0, windowed[1], windowed[2]]]
    pool.allocate(2)
    assert match(pool, tokens, limits).num_blocks == 1
    pool.allocate(1)
    assert match(pool, tokens, limits).num_blocks == 0
    assert pool.num_free == 0


def test_evicted_block_of_a_window_is_replaced() -> None:
    limits = replace(make_limits(), groups=(KvGroup(0), KvGroup(6)))
    pool, tokens = BlockPool(8, limits.groups), list(range(8))
    for table in fill(pool, tokens):
        pool.release(table)
    pool.acquire(match(pool, tokens, limits).tables[0])
    pool.release(pool.allocate(6, 1))  # evicts the window
    assert match(pool, tokens, limits).num_blocks == 0
    again = fill(pool, tokens)
    assert match(pool, tokens, limits).tables[1] == again[1]
    assert len(pool.prefix_cache) == 2


def test_blocks_behind_a_window_are_evicted_first() -> None:
    """But for those that a prefix has used."""
    limits = replace(make_limits(), groups=(KvGroup(0), KvGroup(6)))
    pool = BlockPool(12, limits.groups)
    old, new = list(range(8)), list(range(50, 58))
    for table in fill(pool, old):
        pool.release(table)
    full, windowed = fill(pool, new)
    pool.release(windowed, is_behind=True)
    pool.release(full)
    pool.release(pool.allocate(6))
    assert [match(pool, tokens, limits).num_blocks for tokens in (old, new)] == [2, 0]
    for table in (found := match(pool, old, limits)).tables:
        pool.acquire(table)
    pool.release(found.tables[1], is_behind=True)
    pool.release(found.tables[0])
    pool.allocate(8)
    assert match(pool, old, limits).num_blocks == 2


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of starts, growth, frees behind the window, ends and clears, with three groups of layers."""

    groups = (KvGroup(0, 1), KvGroup(9, 2), KvGroup(3, 1))

    def __init__(self) -> None:
        super().__init__()
        self.limits = replace(make_limits(), groups=self.groups)
        self.pool = BlockPool(40, self.groups)
        self.sequences: list[tuple[list[int], list[list[int]]]] = []  # tokens, tables

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=28))
    def start(self, token_ids: list[int]) -> None:
        keys = keys_of(token_ids)
        prefix = match(self.pool, token_ids, self.limits)
        num_blocks = -(-len(token_ids) // BLOCK_SIZE) - prefix.num_blocks
        if 4 * num_blocks + sum(map(self.pool.num_unused, prefix.tables)) > self.pool.num_free:
            return
        for group, table in zip(self.groups, prefix.tables, strict=True):
            first = group.first_block(prefix.num_blocks * BLOCK_SIZE, BLOCK_SIZE)
            assert 0 not in table[first:], "all blocks that are read are found"
            self.pool.acquire(table)
        for number, table in enumerate(prefix.tables):
            table += self.pool.allocate(num_blocks, number)
        for index in range(prefix.num_blocks, len(keys)):
            tokens = array("i", token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]).tobytes()
            block_ids = [table[index] for table in prefix.tables]
            self.pool.insert(CachedBlock(block_ids, keys[index], keys[index - 1] if index else ROOT, tokens))
        self.sequences.append((token_ids, prefix.tables))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free_behind_the_window(self, data: st.DataObject) -> None:
        token_ids, tables = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        for group, table in zip(self.groups, tables, strict=True):
            end = group.first_block(len(token_ids), BLOCK_SIZE)
            self.pool.release(table[:end], is_behind=len(token_ids) % 3 > 0)
            table[:end] = [0] * end

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        for table in self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))[1]:
            self.pool.release(table)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        users = Counter(block_id for _, tables in self.sequences for table in tables for block_id in table if block_id)
        assert [users[block_id] for block_id in range(self.pool.num_pages + 1)] == self.pool._num_references
        cached = [*self.pool.prefix_cache._evictable, *self.pool.prefix_cache._behind]
        pages = [page for block_id in [*users, *cached] for page in self.pool.pages(block_id)]
        assert sorted([*pages, *self.pool._vacant]) == list(range(1, self.pool.num_pages + 1))
        assert self.pool.num_free == self.pool.num_pages - sum(len(self.pool.pages(block_id)) for block_id in users)

    @invariant()
    def index_and_blocks_agree(self) -> None:
        index = self.pool.prefix_cache
        indexed = {block_id: entry.key for entry in index for block_id in entry.block_ids if block_id}
        assert {block_id: entry.key for block_id, entry in index._entry_of.items()} == indexed
        assert {*index._evictable, *index._behind} <= set(indexed)
        assert index.num_pages == sum(len(self.pool.pages(block_id)) for block_id in indexed)
        assert self.pool.prefix_cache._reused <= set(indexed)
        assert all(entry.block_ids[0] for entry in index)

    @invariant()
    def shared_blocks_hold_equal_tokens(self) -> None:
        chains: dict[int, list[int]] = {}
        for token_ids, tables in self.sequences:
            for table in tables:
                for index, block_id in enumerate(table):
                    chain = token_ids[: (index + 1) * BLOCK_SIZE]
                    assert not block_id or chains.setdefault(block_id, chain) == chain


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase


# ----------------------------------------------------------------------------------------------------------------- memory


def held_pages(batch: BatchState) -> int:
    return batch.pool.num_pages - batch.pool.num_free


@pytest.mark.parametrize(
    ("windows", "dtype"),
    [(([512] * 5 + [0]) * 4 + [512] * 2, "bfloat16"), (([1024] * 5 + [0]) * 10 + [1024] * 2, "int8"), ([4096] * 32, "float32")],
    ids=["gemma-3-1b", "gemma-3-27b", "mistral-7b"],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_32k_tokens_hold_little_more_than_is_read(windows: list[int], dtype: str, drafts: int) -> None:
    """After a prompt in chunks, and while it answers: at most 1.05 times the bytes that layers can still read."""
    block_size, length = 16, 32768
    spec = KVCacheSpec(*place_layers(windows), 1, 256, 256, block_size, dtype)
    limits = replace(make_limits(2048, 4, block_size), groups=spec.groups, max_drafts=drafts)
    world = World(limits, num_pages(spec.groups, length + 100, block_size, moving_of(2048, 0)), drafts)
    sequence = make_sample("a", [index % 97 for index in range(length)], max_tokens=100)
    world.add(sequence)
    most = 0.0
    position_bytes = (spec.key_bytes + spec.value_bytes) / block_size
    while sequence.num_confirmed < length + 90:
        while len(world.flights) < 2 and world.dispatch().rows:
            pass
        world.land()
        if len(sequence.token_ids) > length + 1:
            readable = sum(min(window or length, len(sequence.token_ids)) for window in windows) * position_bytes
            most = max(most, held_pages(world.batch) * spec.page_bytes / readable)
    assert 1 < most < 1.05


def test_capacity_of_a_window_is_that_of_the_model() -> None:
    """A prompt far longer than the cache fits if its layers see only a window."""
    limits = replace(make_limits(16, 4, 4), groups=(KvGroup(12),))
    world = World(limits, num_pages(limits.groups, 1 << 20, 4, moving_of(16, 0)))
    assert longest_sequence(limits.groups, world.num_pages, 4, moving_of(16, 0), 5000) == 5000
    world.add(make_sample("a", [1, 2, 3] * 1000, max_tokens=50))
    world.run_to_the_end()
    assert world.num_pages < 20


@given(st.sampled_from(ALL_GROUPS), st.integers(1, 400), st.integers(1, 9), st.integers(1, 40))
def test_longest_sequence_is_the_longest_that_fits(groups: tuple[KvGroup, ...], pages: int, size: int, moving: int) -> None:
    longest = longest_sequence(groups, pages, size, moving, 1000)
    assert longest == 1000 or longest % size == 0
    assert num_pages(groups, longest, size, moving) <= pages
    assert longest == 1000 or num_pages(groups, longest + 1, size, moving) > pages


@pytest.mark.slow
@settings(max_examples=80)
@given(
    PROMPTS,
    st.sampled_from(ALL_GROUPS),
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 6),
    st.integers(0, 4),
)
def test_all_requests_end_in_the_smallest_pool(
    prompts: list[tuple[int, int, int, str]],
    groups: tuple[KvGroup, ...],
    budget: int,
    max_running: int,
    block_size: int,
    has_cache: bool,
    spare_pages: int,
    num_drafts: int,
) -> None:
    longest = max(num_prompt + max_tokens for num_prompt, max_tokens, _, _ in prompts)
    limits = replace(make_limits(budget, max_running, block_size, has_cache), groups=groups, max_drafts=num_drafts)
    pages = num_pages(groups, longest, block_size, moving_of(budget, 0)) + spare_pages
    world = World(limits, pages, num_drafts)
    for order, (num_prompt, max_tokens, priority, group_id) in enumerate(prompts):
        tokens = [1] * num_prompt
        world.add(make_sample(f"s{order}", tokens, max_tokens, priority, arrival_ns=order % 3, order=order, group_id=group_id))
    world.run_to_the_end()


def test_running_prompts_keep_their_blocks() -> None:
    """Blocks that a prompt in progress will need are not given to others: nothing is preempted."""
    limits = replace(make_limits(8, 8, 4, False), groups=MIXED)
    one = num_pages(MIXED, 40, 4, moving_of(8, 0))
    world = World(limits, 2 * one + 3 * 3)
    for order in range(6):
        world.add(make_sample(f"s{order}", list(range(40)), max_tokens=1, order=order))
    needs = PageNeeds(limits)
    for _ in range(200):
        while len(world.flights) < 2 and world.dispatch().rows:
            assert needs.kept_for(world.batch.running) <= world.batch.pool.num_free
        if not world.flights:
            break
        world.land()
    assert not world.batch.sequences
    assert world.num_preemptions == 0


# ------------------------------------------------------------------------------------------------------------- simulation


def submit_related(simulation: Simulation, rng: random.Random, count: int, **options: Any) -> None:
    """Submit prompts that share beginnings of all lengths."""
    shared = [index % 61 for index in range(90)]
    for _ in range(count):
        prompt = [*shared[: rng.randrange(90)], *(rng.randrange(61) for _ in range(rng.randrange(1, 30)))]
        simulation.submit(prompt, seed=rng.randrange(99), **({"max_tokens": rng.randrange(1, 50)} | options))


def shown_keys(simulation: Simulation) -> set[bytes]:
    """Return the keys of the cached blocks by KV events."""
    shown: set[bytes] = set()
    for message in simulation.cache_messages:
        match message:
            case BlocksStored(block_hashes):
                shown.update(block_hashes)
            case BlocksRemoved(block_hashes):
                shown.difference_update(block_hashes)
            case BlocksCleared():
                shown.clear()
    return shown


@pytest.mark.parametrize("groups", ALL_GROUPS, ids=NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 200},
        {"num_kv_blocks": 60, "max_num_batched_tokens": 11},
        {"num_kv_blocks": 45, "block_size": 5, "max_num_batched_tokens": 7, **DRAFTS},
        {"num_kv_blocks": 60, **LAYERS},
        {"num_kv_blocks": 60, "enable_prefix_caching": False, "tensor_parallel_size": 2},
    ],
    ids=["room", "evicted", "drafts", "mtp", "uncached-two-ranks"],
)
def test_answers_do_not_depend_on_freed_blocks(directory: Path, groups: tuple[KvGroup, ...], options: dict[str, Any]) -> None:
    """Whatever is cached, preempted, drafted, lost with a rank or the scheduler, or submitted again."""
    rng = random.Random(len(groups))
    with simulate(directory, kv_groups=groups, **options) as simulation:
        simulation.num_wanted_drafts = 5 if "speculative_config" in options else 0
        for number in range(4):
            submit_related(simulation, rng, 8)
            if number:
                for _ in range(3):
                    for _ in range(rng.randrange(1, 12)):
                        simulation.turn()
                    simulation.restart_rank() if rng.random() < 0.8 else simulation.restart_scheduler()
            simulation.finish()
        simulation.check()
        simulation.check_idle()
        if options.get("enable_prefix_caching", True):
            assert simulation.metric("prefix_cache_hits_total") > 0
        index = simulation.scheduler.batch.pool.prefix_cache
        simulation.run_until(lambda: shown_keys(simulation) == {entry.key for entry in index}, "KV events show the index")


def test_repeated_deaths_read_no_freed_block(directory: Path) -> None:
    """A rank that dies before it has a result goes back to the same position each time."""
    with simulate(directory, kv_groups=SHORTEST, block_size=1, num_kv_blocks=300, **LAYERS) as simulation:
        streams = submit_all(simulation, 4, max_tokens=40)
        simulation.start(*streams, num_tokens=9)
        for _ in range(5):
            simulation.loop.turn()
            simulation.restart_rank()
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_late_masks_read_no_freed_block(directory: Path) -> None:
    with simulate(directory, kv_groups=SHORTEST, block_size=1, num_kv_blocks=400, **LAYERS) as simulation:
        simulation.late_share, simulation.num_wanted_drafts = 0.3, 4
        submit_all(simulation, 8, max_tokens=40)
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_conversation_is_found_with_its_last_window(directory: Path) -> None:
    """All but the end of a turn is found, though most blocks of layers with a window are freed."""
    with simulate(directory, kv_groups=MIXED, num_kv_blocks=100) as simulation:
        prompt = [index % 61 for index in range(100)]
        stream = simulation.submit(prompt, max_tokens=20)
        simulation.finish()
        prompt = [*prompt, *stream.token_ids, 7, 8, 9]
        simulation.submit(prompt)
        simulation.finish()
        assert simulation.metric("prefix_cache_hits_total") == 116
        simulation.check()


def test_freed_blocks_are_shown_as_free(directory: Path) -> None:
    """A long sequence of layers with a window does not fill the cache."""
    with simulate(directory, kv_groups=(KvGroup(8, 1),), num_kv_blocks=64) as simulation:
        assert simulation.config.max_positions == 256
        stream = simulation.submit([1, 2, 3] * 50, max_tokens=100)
        simulation.start(stream, num_tokens=80)
        assert simulation.metric("num_free_kv_blocks") >= 60
        assert simulation.metric("num_kv_blocks") == 64
        simulation.finish()
        simulation.check()
        simulation.check_idle()
