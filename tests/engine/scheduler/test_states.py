"""Slots of recurrent states: none is lost or used twice, none is written while it may be read, and what is read is right."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_keys import hash_blocks
from engine.kv_groups import KvGroup
from engine.messages import BlocksCleared, ReloadWeights, ResetPrefixCache, StatesRemoved, StatesStored
from engine.scheduler.states import SequenceStates, StatePool, StateRules, StateUse
from tests.engine.scheduler.simulation import Simulation, expected_tokens, ints, simulate
from tests.engine.scheduler.test_drafts import DRAFTS, LAYERS, submit_all
from tests.engine.scheduler.test_windows import submit_related

SIZE = 4
STATES = {"num_states": 40, "state_cache_interval": 8}  # for 8 sequences: 16 more than they need
RULES = StateRules(SIZE, 8)


def keys_of(token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    hash_blocks(array("i", token_ids), SIZE, keys, len(token_ids))
    return keys


# ------------------------------------------------------------------------------------------------------------------ rules


def wanted(rules: StateRules, num_prompt_tokens: int, branch: int, start: int, end: int) -> list[int]:
    """Return the boundaries in (start, end] by their definition: of a prompt, and the last one of what follows."""
    last = rules.last_of_prompt(num_prompt_tokens)
    of_prompt = {last, branch, *range(0, last, rules.interval)}
    found = [each for each in range(start + 1, end + 1) if each in of_prompt]
    return found + [each for each in range(start + 1, end + 1) if each % rules.block_size == 0 and each > last][-1:]


PROMPT, BRANCH, INTERVAL = st.integers(1, 200), st.integers(0, 50), st.sampled_from([4, 8, 12, 32])


@given(PROMPT, BRANCH, st.integers(0, 200), st.integers(1, 100), INTERVAL)
def test_the_last_wanted_state_is_kept(num_prompt: int, branch: int, start: int, length: int, interval: int) -> None:
    rules = StateRules(SIZE, interval)
    branch = min(branch * SIZE, rules.last_of_prompt(num_prompt))
    found = wanted(rules, num_prompt, branch, start, start + length)
    assert rules.last_wanted(start, start + length, num_prompt, branch) == (found[-1] if found else 0)
    assert all(rules.is_wanted(each, num_prompt, branch) for each in found)


@given(PROMPT, BRANCH, st.integers(0, 200), st.integers(1, 100), INTERVAL)
def test_a_cut_chunk_keeps_all_states_of_a_prompt(num_prompt: int, branch: int, start: int, length: int, interval: int) -> None:
    rules, end = StateRules(SIZE, interval), min(num_prompt, start + length)
    branch = min(branch * SIZE, rules.last_of_prompt(num_prompt))
    if start >= end:
        return
    cut = rules.cut(start, end, num_prompt, branch)
    assert start < cut <= end
    if end - start <= interval and not start < branch < end:
        assert cut == end
    else:
        assert len(wanted(rules, num_prompt, branch, start, cut - 1)) <= 1, "one within the chunk, and one at its end"
        assert cut == end or rules.is_wanted(cut, num_prompt, branch)


def test_chunks_stay_whole_without_kept_states() -> None:
    assert StateRules(SIZE, 0).cut(0, 100, 100) == 100
    assert StateRules(SIZE, 0).last_wanted(0, 100, 100) == 0
    assert not StateRules(SIZE, 0).is_wanted(8, 100)


# ------------------------------------------------------------------------------------------------------------------- pool


def run_prompt(pool: StatePool, tokens: list[int], chunk: int, *, num_prompt: int = 0) -> SequenceStates:
    """Compute a prompt in chunks from the beginning."""
    states, keys = pool.start(), keys_of(tokens)
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        pool.dispatch(states, end, 0, num_prompt or len(tokens), can_keep=True)
        pool.confirm(states, end, keys, num_prompt or len(tokens), can_keep=True)
    return states


def kept(pool: StatePool, tokens: list[int]) -> list[int]:
    """Return the positions of these tokens' kept states."""
    return [SIZE * (index + 1) for index, key in enumerate(keys_of(tokens)) if key in pool.kept_keys]


def test_states_of_a_prompt_are_kept_at_intervals_and_at_its_end() -> None:
    pool, tokens = StatePool(30, 2, RULES), list(range(30))
    pool.leave(run_prompt(pool, tokens, 8))
    assert kept(pool, tokens) == [8, 16, 24, 28]
    assert (pool.num_used, pool.num_kept, pool.num_free) == (0, 4, 30)
    found = pool.start(keys_of(tokens)[6])
    assert (found.position, pool.num_hits, pool.num_used) == (28, 1, 1)


def test_of_an_answer_the_last_state_is_kept() -> None:
    """But one that another sequence continued from stays."""
    pool, tokens = StatePool(30, 2, RULES), list(range(40))
    run_prompt(pool, tokens[:21], 1, num_prompt=10)
    assert kept(pool, tokens) == [8, 20]
    pool.start(keys_of(tokens)[4])
    states = run_prompt(pool, tokens[:32], 1, num_prompt=10)
    assert kept(pool, tokens) == [8, 20, 32]
    assert states.answer_key == keys_of(tokens)[7]


def test_least_worthy_state_is_evicted() -> None:
    """By the time that computing it again takes, by its uses, and then by age."""
    pool = StatePool(6, 1, RULES, lambda start, count: float(count))
    long, short, other = list(range(9)), [50, 51, 52, 53, 54], [60, 61, 62, 63, 64]
    for tokens in (long, short, other):
        pool.leave(run_prompt(pool, tokens, 99))
    pool.leave(pool.start(keys_of(short)[0]))
    states = pool.start()
    found = []
    for end in range(1, 6):
        pool.dispatch(states, end, 0, 1)
        found.append([len(kept(pool, tokens)) for tokens in (long, short, other)])
    assert found == [[1, 1, 1]] * 3 + [[1, 1, 0], [0, 1, 0]]
    assert pool.num_evictions == 2


def test_eviction_values_few_of_many_states() -> None:
    """States that are dropped in other ways leave nothing behind."""
    num_valued = 0

    def cost(start: int, count: int) -> float:
        nonlocal num_valued
        num_valued += 1
        return count

    pool = StatePool(3 + 1000, 1, RULES, cost)
    for number in range(3000):
        keep_whole_prompt(pool, number)
        if number == 1999:
            assert pool.num_evictions > 900
            num_valued = 0
    assert pool.num_evictions > 1900
    assert num_valued < 4 * 1000, "values of 1000 evictions"
    for number in range(3000):
        pool.clear()
        keep_whole_prompt(pool, number)
    assert len(pool._ranks) < 200


def keep_whole_prompt(pool: StatePool, number: int) -> None:
    states = pool.start()
    pool.dispatch(states, SIZE, 0, SIZE + 1, can_keep=True)
    pool.confirm(states, SIZE, [b"%d" % number], SIZE + 1, can_keep=True)
    pool.leave(states)


def test_state_before_an_evicted_one_counts_for_less_time() -> None:
    pool = StatePool(12, 1, RULES, lambda start, count: float(count))
    tokens = list(range(24))
    pool.leave(run_prompt(pool, tokens, 8))
    entries = {entry.position: pool._value(entry) for entry in pool._kept.values()}
    assert entries == {8: 8.0, 16: 8.0, 20: 4.0, 24: 4.0}
    pool.drop(keys_of(tokens)[1])
    entries = {entry.position: pool._value(entry) for entry in pool._kept.values()}
    assert entries == {16: 16.0, 20: 4.0, 24: 4.0}


def test_kept_states_give_way_to_sequences() -> None:
    pool = StatePool(9, 3, RULES)
    for number in range(9):
        pool.leave(run_prompt(pool, [number] * 8, 99))
    assert pool.num_kept == 9
    running = [pool.start() for _ in range(3)]
    for states in running:
        for end in (1, 2):
            pool.dispatch(states, end, 0, 9)
    assert pool.num_used == 6
    for states in running:
        pool.confirm(states, 1, [], 9)
        pool.dispatch(states, 3, 0, 9)
    assert (pool.num_used, pool.num_free, pool.num_kept) == (9, 0, 0)


@dataclass(eq=False)
class Flight:
    """A step of one sequence in flight: what the scheduler says and what the rank knows."""

    use: StateUse
    num_drafts: int
    num_right: int
    end: int  # of the certain positions
    is_sampling: bool


@dataclass(eq=False)
class Running:
    """A sequence whose tokens are determined: those in the scheduler are known, or sampled in flight."""

    tokens: list[int]
    num_prompt: int
    states: SequenceStates
    num_known: int
    num_computed: int
    num_confirmed: int
    num_unknown: int = 0
    num_ahead: int = 0
    num_written: int = 0  # tokens that the rank knows
    is_late: bool = False
    flights: list[Flight] = field(default_factory=list)

    def go_back(self, overlap: int) -> None:
        self.num_unknown = self.num_ahead = 0
        self.is_late = False
        self.num_computed = max(self.num_confirmed - overlap, self.states.position, 0)
        self.num_written = self.num_known
        self.flights.clear()


class StateMachine(RuleBasedStateMachine):
    """Any order of starts, chunks, drafts, results, late masks, losses, evictions and ends, with a rank that runs ahead."""

    overlap = 0
    num_running = 3

    def __init__(self) -> None:
        super().__init__()
        self.rules = StateRules(SIZE, 8, self.overlap)
        self.pool = StatePool(3 * self.num_running + 4, self.num_running, self.rules, lambda start, count: float(count))
        self.running: list[Running] = []
        self.memory: dict[int, tuple[list[int], list[int]]] = {0: ([], [])}  # slot -> tokens in the state, logged ones

    def choose(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=26), seed=st.integers(0, 1), branch=st.integers(0, 6))
    def start(self, prompt: list[int], seed: int, branch: int) -> None:
        if len(self.running) == self.num_running:
            return
        tokens = [*prompt, *(index * index * (seed + 1) // 3 % 2 for index in range(40))]
        keys = keys_of(prompt)[: (len(prompt) - 1) // SIZE]
        found = self.pool.longest(keys, len(keys))
        states = self.pool.start(keys[found - 1] if found else b"", min(branch * SIZE, self.rules.last_of_prompt(len(prompt))))
        start = max(0, found * SIZE - self.overlap)
        assert states.position == start
        self.running.append(Running(tokens, len(prompt), states, len(prompt), start, start, num_written=len(prompt)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), budget=st.integers(1, 20), drafts=st.integers(0, 5))
    def dispatch(self, data: st.DataObject, budget: int, drafts: int) -> None:
        each = self.choose(data)
        num_due = each.num_known + each.num_unknown - each.num_computed
        if len(each.flights) == 2 or each.is_late or num_due <= 0 or each.num_known > len(each.tokens) - 20:
            return
        is_following = each.num_ahead > 0
        end = self.rules.cut(each.num_computed, each.num_computed + budget, each.num_prompt, each.states.branch)
        count = min(num_due, end - each.num_computed)
        is_sampling = count == num_due
        drafts = drafts if is_sampling and each.num_computed >= each.num_prompt else 0
        others = self.readable()
        use = self.pool.dispatch(each.states, each.num_computed + count, each.num_ahead, each.num_prompt, can_keep=True)
        assert use.write
        assert not {use.write, use.keep} & others, "what may be read is not written"
        start = each.num_written - 1 if is_following else each.num_computed
        right = data.draw(st.integers(0, drafts))
        self.run(each, use, start, count, drafts, right, is_following=is_following)
        each.flights.append(Flight(use, drafts, right, start + count, is_sampling))
        each.num_computed += count
        each.num_unknown += is_sampling
        each.num_ahead += drafts
        each.num_written += (1 + right) * is_sampling

    def run(self, each: Running, use: StateUse, start: int, count: int, drafts: int, right: int, *, is_following: bool) -> None:
        """Do what a rank does."""
        known, log = self.memory[use.read]
        assert is_following or len(known) == use.position
        assert len(known) >= use.position
        assert len(known) <= start <= len(known) + len(log)
        replayed = known + log[: start - len(known)]
        assert replayed == each.tokens[:start], "the state is that of the tokens before"
        num_certain = max(0, count - self.overlap)
        rows = each.tokens[start : start + count + right] + [7] * (drafts - right)  # no token of any sequence
        self.memory[use.write] = (replayed + rows[:num_certain], rows[num_certain:])
        if use.keep and len(known) < use.keep_at <= start + num_certain:
            self.memory[use.keep] = (each.tokens[: use.keep_at], [])

    @precondition(lambda self: any(each.flights for each in self.running))
    @rule(data=st.data(), is_late=st.booleans())
    def result(self, data: st.DataObject, is_late: bool) -> None:
        each = data.draw(st.sampled_from([each for each in self.running if each.flights]))
        flight = each.flights.pop(0)
        if each.is_late or (is_late and flight.is_sampling):
            each.is_late = True
            self.pool.discard(each.states)
            if not each.flights:
                each.go_back(self.overlap)
            return
        each.num_confirmed = flight.end
        if flight.is_sampling:
            each.num_unknown -= 1
            each.num_ahead -= flight.num_drafts
            each.num_computed += flight.num_right
            each.num_confirmed += flight.num_right
            each.num_known = each.num_confirmed + 1
        keys = keys_of(each.tokens[: each.num_confirmed])
        num_accepted = flight.num_right if flight.is_sampling else 0
        self.pool.confirm(each.states, flight.end, keys, each.num_prompt, num_accepted=num_accepted, can_keep=True)

    @rule()
    def lose(self) -> None:
        """A rank dies."""
        for each in self.running:
            self.pool.rollback(each.states)
            each.go_back(self.overlap)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        each = self.choose(data)
        if not each.flights:
            self.running.remove(each)
            self.pool.leave(each.states)

    @precondition(lambda self: self.pool.num_kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pool.drop(data.draw(st.sampled_from(self.pool.kept_keys)))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    def held(self) -> Counter[int]:
        slots: Counter[int] = Counter()
        for each in self.running:
            slots.update([each.states.slot, *(slot for use in each.states.flight for slot in (use.write, use.keep))])
        del slots[0]
        return slots

    def readable(self) -> set[int]:
        """Return the slots that a step may read now or later."""
        return {*self.held(), *self.pool._kept_in}

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        held, idle = self.held(), [slot for slot in self.pool._kept_in if not self.pool._num_references[slot]]
        assert [held[slot] for slot in range(self.pool.num_states + 1)] == self.pool._num_references
        assert sorted([*held, *idle, *self.pool._vacant]) == list(range(1, self.pool.num_states + 1))
        assert (self.pool.num_used, self.pool.num_free) == (len(held), self.pool.num_states - len(held))

    @invariant()
    def kept_states_have_the_tokens_of_their_keys(self) -> None:
        for key, entry in self.pool._kept.items():
            tokens, log = self.memory[entry.slot]
            whole = (tokens + log)[: entry.position + self.overlap]
            assert len(tokens) == entry.position
            if not self.overlap:
                assert keys_of(whole)[-1] == key

    @invariant()
    def confirmed_states_are_not_ahead_of_results(self) -> None:
        for each in self.running:
            assert each.states.position <= each.num_confirmed
            assert self.memory[each.states.slot][0] == each.tokens[: each.states.position]


class OverlapMachine(StateMachine):
    """With draft layers, a sequence continues one position early."""

    overlap = 1


StateMachine.TestCase.settings = OverlapMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestStates = StateMachine.TestCase
TestOverlap = OverlapMachine.TestCase


# ------------------------------------------------------------------------------------------------------------- simulation


def shown_states(simulation: Simulation) -> set[bytes]:
    """Return the keys of the kept states by KV events."""
    shown: set[bytes] = set()
    for message in simulation.cache_messages:
        match message:
            case StatesStored(block_hashes):
                shown.update(block_hashes)
            case StatesRemoved(block_hashes):
                shown.difference_update(block_hashes)
            case BlocksCleared():
                shown.clear()
    return shown


def kept_keys(simulation: Simulation) -> set[bytes]:
    states = simulation.scheduler.batch.pool.states
    assert states is not None
    return set(states.kept_keys)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 200},
        {"num_states": 25, "max_num_batched_tokens": 11},
        {"num_states": 24},
        {"num_kv_blocks": 42, "max_num_batched_tokens": 11},
        {"block_size": 5, "state_cache_interval": 10, "num_kv_blocks": 45, "max_num_batched_tokens": 7, **DRAFTS},
        {"block_size": 1, "state_cache_interval": 3, "num_kv_blocks": 250, **DRAFTS},
        {"num_kv_blocks": 60, **LAYERS},
        {"block_size": 1, "state_cache_interval": 1, "num_kv_blocks": 250, "max_num_batched_tokens": 7, **LAYERS},
        {"num_kv_blocks": 60, "enable_prefix_caching": False, "state_cache_interval": 0, "tensor_parallel_size": 2},
        {"num_kv_blocks": 60, "kv_groups": (KvGroup(0, 1), KvGroup(10, 2)), **DRAFTS},
    ],
    ids=[
        *("room", "few-kept", "none-spare", "preempted", "drafts", "drafts-block-1", "mtp", "mtp-block-1"),
        *("uncached-two-ranks", "windows"),
    ],
)
def test_answers_do_not_depend_on_states(directory: Path, options: dict[str, Any]) -> None:
    """Whatever is kept, evicted, preempted, drafted, lost with a rank or the scheduler, or submitted again."""
    rng = random.Random(5)
    with simulate(directory, **(STATES | options)) as simulation:
        simulation.num_wanted_drafts = 5 if "speculative_config" in options else 0
        simulation.wanting_share, simulation.rank_records = 0.6, 1
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
        assert (simulation.metric("state_cache_hits_total") > 0) == options.get("enable_prefix_caching", True)
        simulation.run_until(lambda: shown_states(simulation) == kept_keys(simulation), "KV events show the kept states")


@pytest.mark.parametrize(
    "options", [{}, DRAFTS, LAYERS, {"enable_prefix_caching": False}], ids=["plain", "drafts", "mtp", "off"]
)
def test_late_masks_read_the_state_before(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, num_kv_blocks=400, **(STATES | options)) as simulation:
        simulation.late_share, simulation.num_wanted_drafts = 0.3, 4
        submit_all(simulation, 8, max_tokens=40)
        simulation.finish()
        simulation.check()
        simulation.check_idle()


@pytest.mark.parametrize("options", [{}, DRAFTS, LAYERS], ids=["plain", "drafts", "mtp"])
def test_repeated_deaths_read_the_confirmed_state(directory: Path, options: dict[str, Any]) -> None:
    """A rank that dies before it has a result goes back to the same position each time."""
    with simulate(directory, num_kv_blocks=300, **(STATES | options)) as simulation:
        simulation.num_wanted_drafts = 4
        streams = submit_all(simulation, 4, max_tokens=40)
        for _ in range(3):  # before the first result, too
            simulation.loop.turn()
            simulation.restart_rank()
        simulation.start(*streams, num_tokens=9)
        for _ in range(5):
            simulation.loop.turn()
            simulation.restart_rank()
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_every_turn_of_a_conversation_continues_from_a_state(directory: Path) -> None:
    with simulate(directory, num_kv_blocks=512, max_model_len=512, **STATES) as simulation:
        prompt = [index % 61 for index in range(30)]
        for turn in range(10):
            stream = simulation.submit(prompt, max_tokens=13)
            simulation.finish()
            assert simulation.metric("state_cache_hits_total") == turn
            cached = stream.admissions[-1].num_cached_tokens
            assert cached == ((len(prompt) - 8) // 4 * 4 if turn else 0), "all but the end of the last answer"
            prompt = [*prompt, *stream.token_ids, 7, 8, 9, 10, 11, 12, 13]
        simulation.check()
        assert simulation.metric("num_used_states") == 0
        assert simulation.metric("num_cached_states") > 10


def test_sequences_of_a_request_share_the_state_of_the_prompt(directory: Path) -> None:
    with simulate(directory, **STATES) as simulation:
        prompt = [index % 61 for index in range(29)]
        streams = [simulation.submit(prompt, f"r1-{index}", group_id="r1", seed=index) for index in range(4)]
        simulation.finish()
        simulation.check()
        assert simulation.metric("state_cache_hits_total") == 3
        assert [stream.admissions[-1].num_cached_tokens for stream in streams] == [0, 28, 28, 28]


def test_shared_beginning_gets_a_state_at_its_branch(directory: Path) -> None:
    """The second prompt that begins like another one keeps the state where they differ, and the third one finds it."""
    with simulate(directory, num_states=40, state_cache_interval=64) as simulation:
        shared = [index % 61 for index in range(22)]
        streams = []
        for number in range(3):
            streams.append(simulation.submit([*shared, *([number] * 9)]))
            simulation.finish()
        simulation.check()
        assert [stream.admissions[-1].num_cached_tokens for stream in streams] == [0, 0, 20]


def test_preempted_sequence_continues_from_its_last_state(directory: Path) -> None:
    with simulate(directory, num_kv_blocks=22, **STATES) as simulation:
        first, second = (simulation.submit([number] * 20, max_tokens=30, seed=number) for number in (1, 2))
        simulation.finish()
        simulation.check(first, second)
        simulation.check_idle()
        assert simulation.metric("num_preemptions_total") == 1
        assert simulation.metric("state_cache_hits_total") == 1
        last = max(start for step in simulation.rank.steps for start in ints(step.start) if step.starts)
        assert last >= 16


def test_prompt_with_logprobs_is_computed_from_its_beginning(directory: Path) -> None:
    with simulate(directory, **STATES) as simulation:
        prompt = [index % 61 for index in range(40)]
        simulation.submit(prompt)
        simulation.finish()
        stream = simulation.submit(prompt, num_prompt_logprobs=0)
        simulation.finish()
        simulation.check()
        assert len(stream.prompt_logprobs) == 39
        assert simulation.metric("state_cache_hits_total") == 0


def test_aborted_requests_hold_no_slot(directory: Path) -> None:
    rng = random.Random(7)
    with simulate(directory, num_kv_blocks=40, **STATES, **DRAFTS) as simulation:
        simulation.num_wanted_drafts = 4
        for _ in range(60):
            submit_related(simulation, rng, 3)
            for _ in range(rng.randrange(4)):
                simulation.turn()
            for stream in list(simulation.streams.values()):
                if not stream.is_over and rng.random() < 0.4:
                    simulation.abort(stream)
        simulation.run_until(lambda: not simulation.scheduler.batch.sequences, "all requests are over")
        simulation.run_until(lambda: not simulation.scheduler.batch.num_leaving, "all steps are back")
        simulation.check_idle()


@pytest.mark.parametrize("mode", ["requeue", "keep"])
def test_other_weights_clear_the_kept_states(directory: Path, mode: str) -> None:
    with simulate(directory, **STATES) as simulation:
        prompt = [index % 61 for index in range(40)]
        simulation.submit(prompt)
        simulation.finish()
        running = simulation.submit(prompt, max_tokens=30)
        simulation.start(running)
        assert kept_keys(simulation)
        simulation.ask(ReloadWeights("/weights/b", mode))
        assert simulation.metric("num_cached_states") == 0
        simulation.finish()
        again = simulation.submit(prompt)
        simulation.finish()
        assert again.token_ids == expected_tokens(prompt, again.request.sampling, "/weights/b", (0, 0))
        simulation.check_idle()


def test_states_are_cleared_with_the_prefix_cache(directory: Path) -> None:
    with simulate(directory, **STATES) as simulation:
        prompt = [index % 61 for index in range(40)]
        simulation.submit(prompt)
        simulation.finish()
        simulation.ask(ResetPrefixCache())
        assert not kept_keys(simulation)
        simulation.submit(prompt)
        simulation.finish()
        assert simulation.metric("state_cache_hits_total") == 0
        simulation.check()
        simulation.check_idle()


def test_lost_memory_of_a_rank_loses_the_states(directory: Path) -> None:
    with simulate(directory, **STATES) as simulation:
        simulation.caches_outlive_ranks = False
        simulation.rank.close()
        simulation.revive_rank()
        streams = submit_all(simulation, 4, max_tokens=30)
        simulation.start(*streams, num_tokens=5)
        simulation.restart_rank()
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_state_goes_with_its_block(directory: Path) -> None:
    """A state without the keys and values before it is of no use."""
    with simulate(directory, num_kv_blocks=20, num_states=200, state_cache_interval=8) as simulation:
        for number in range(6):
            simulation.submit([number] * 40, max_tokens=2)
            simulation.finish()
        index = {entry.key for entry in simulation.scheduler.batch.pool.prefix_cache}
        assert kept_keys(simulation) <= index
        assert len(kept_keys(simulation)) < 12
        simulation.check()
        simulation.check_idle()


def test_steps_of_models_without_states_say_nothing(directory: Path) -> None:
    with simulate(directory) as simulation:
        simulation.submit([1, 2, 3])
        simulation.finish()
        assert all(step.states == b"" for step in simulation.rank.steps)
        assert simulation.metric("num_states") == 0


def test_decoding_copies_no_state(directory: Path) -> None:
    """The written state of an answer is kept itself. Only chunks of a prompt write a second one."""
    with simulate(directory, **STATES) as simulation:
        simulation.submit([index % 61 for index in range(30)], max_tokens=40)
        simulation.finish()
        keeps = [keep for step in simulation.rank.steps for keep in ints(step.states)[3::5]]
        assert sum(map(bool, keeps)) == 2
        assert len(kept_keys(simulation)) == 5
