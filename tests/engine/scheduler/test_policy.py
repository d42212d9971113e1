"""The policy as functions: budget, order, chunks, preemption, and progress to the end in the smallest pools."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.dispatch import build_step
from engine.scheduler.limits import Limits
from engine.scheduler.policy import SchedulerOutput, SequenceChunk, next_row, schedule
from engine.scheduler.queues import place_in_line
from engine.scheduler.sequence import Sequence, SequenceState, start_bytes
from engine.scheduler.step_cost import StepCost, StepLoad
from tests.engine.scheduler.sequences import ListReader, make_limits, make_sample
from tests.requests import with_shared


@dataclass
class World:
    """A batch, and a rank that samples 0 for ever; two steps in flight. Some of `num_wanted` drafts are accepted."""

    limits: Limits
    num_pages: int
    num_wanted: int = 0
    flights: deque[list[SequenceChunk]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.batch = BatchState(self.limits, BlockPool(self.num_pages, self.limits.groups), lambda entries: None)
        self.batch.num_wanted_by_new_requests = self.num_wanted
        self.num_preemptions = 0
        self.passed_over: Sequence | None = None
        self.cost = StepCost(0)
        self.starving_before_ns = 0

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.batch.add(sequence)

    def plan(self) -> SchedulerOutput:
        batch = self.batch
        return schedule(
            batch.running,
            batch.waiting,
            batch.leaders,
            batch.pool,
            self.limits,
            batch.num_leaving,
            cost=self.cost,
            passed_over=self.passed_over,
            starving_before_ns=self.starving_before_ns,
        )

    def dispatch(self) -> SchedulerOutput:
        """Plan a step and put it in flight."""
        plan = self.plan()
        self.passed_over = plan.passed_over
        if plan.preempted is not None:
            self.num_preemptions += 1
            self.batch.preempt(plan.preempted)
        for sequence in plan.trimmed:
            self.batch.trim(sequence)
        self.batch.admit(plan.admitted)
        self.check(plan)
        if plan.rows:
            build_step(1, plan.rows, self.batch, 0)
            self.flights.append(plan.rows)
        return plan

    def check(self, plan: SchedulerOutput) -> None:
        assert sum(row.num_tokens for row in plan.rows) <= self.limits.max_tokens
        assert len(self.batch.running) + self.batch.num_leaving <= self.limits.max_running
        assert len({row.sequence.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.sequence.state is SequenceState.RUNNING
            assert row.start == row.sequence.num_computed
            assert row.num_tokens > 0

    def land(self) -> None:
        """Apply the result of the oldest step in flight."""
        for row in self.flights.popleft():
            sequence = row.sequence
            sequence.num_in_flight -= 1
            if sequence.state is not SequenceState.FINISHED:
                sequence.num_confirmed = row.start + row.num_tokens
                if row.is_sampling:
                    num_right = row.num_drafts * (len(sequence.token_ids) % 3) // 2
                    num_right = min(num_right, sequence.max_total_tokens - len(sequence.token_ids) - 1)
                    sequence.num_unknown -= 1
                    sequence.num_ahead -= row.num_drafts
                    sequence.num_computed += num_right
                    sequence.token_ids.extend([0] * (1 + num_right))
                    if row.num_drafts:
                        sequence.num_confirmed = len(sequence.token_ids) - 1
                self.batch.share_blocks(sequence)
                if self.batch.windowed:
                    self.batch.free_behind_windows(sequence)
                if (
                    len(sequence.token_ids) == sequence.max_total_tokens
                    and sequence.num_confirmed >= sequence.num_prompt_tokens
                ):
                    self.batch.finish(sequence)
            if not sequence.num_in_flight:
                self.batch.release_drained(sequence)

    def run_to_the_end(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            while len(self.flights) < 2:
                plan = self.dispatch()
                if not plan.rows and plan.preempted is None:
                    break
            if not self.flights:
                break
            self.land()
        assert not self.batch.sequences, f"{len(self.batch.sequences)} sequences never end"
        assert self.batch.pool.num_free == self.num_pages
        assert self.batch.num_leaving == 0


def row_of(plan: SchedulerOutput, sequence: Sequence) -> tuple[int, int, bool] | None:
    return next(((row.start, row.num_tokens, row.is_sampling) for row in plan.rows if row.sequence is sequence), None)


def test_long_prompt_is_cut_to_the_budget() -> None:
    world = World(make_limits(max_tokens=16), 64)
    sequence = make_sample("a", list(range(40)))
    world.add(sequence)
    cuts = [row_of(world.dispatch(), sequence) for _ in range(3)]
    assert cuts == [(0, 16, False), (16, 16, False), (32, 8, True)]


def test_step_ahead_counts_the_unknown_token() -> None:
    world = World(make_limits(), 64)
    sequence = make_sample("a", [1, 2, 3], max_tokens=3)
    world.add(sequence)
    assert row_of(world.dispatch(), sequence) == (0, 3, True)
    assert row_of(world.dispatch(), sequence) == (3, 1, True)
    assert row_of(world.dispatch(), sequence) == (4, 1, True)
    assert world.dispatch().rows == []  # never past max_tokens, though no result is back


def test_decode_and_prefill_share_a_step_in_order() -> None:
    world = World(make_limits(max_tokens=10), 64)
    first, second, third = (make_sample(name, [9] * 12, order=order) for order, name in enumerate("abc"))
    world.add(first)
    world.dispatch()
    world.dispatch()
    world.add(second, third)
    plan = world.dispatch()
    assert row_of(plan, first) == (12, 1, True)
    assert row_of(plan, second) == (0, 5, False)  # of another user each: they share alike
    assert row_of(plan, third) == (0, 4, False)


def world_with_stream(num_tokens: int = 16) -> tuple[World, Sequence]:
    """Return a world with a decoding stream of another user."""
    world = World(make_limits(max_tokens=num_tokens, max_running=8), 256)
    stream = make_sample("stream", [1, 2, 3], max_tokens=100)
    world.add(stream)
    world.dispatch()
    world.land()
    return world, stream


@pytest.mark.parametrize("priority", [-(2**31), 0, 2**31])
def test_prompt_takes_no_token_from_a_running_stream(priority: int) -> None:
    world, stream = world_with_stream()
    long = make_sample("long", [*range(400)], 1, priority, arrival_ns=1, order=1)
    world.add(long)
    num_tokens = 0
    while not row_of(world.plan(), long) or row_of(world.plan(), long)[2] is False:  # type: ignore[index]
        plan = world.dispatch()
        assert row_of(plan, stream) == (3 + num_tokens, 1, True)
        assert sum(row.num_tokens for row in plan.rows) == 16, "the prompt gets all that is left"
        num_tokens += 1
        world.land()


def test_priority_preempts_no_older_sequence() -> None:
    world = World(make_limits(max_tokens=64, max_running=3, has_prefix_cache=False), 6)
    old = make_sample("old", [1] * 7, 9, arrival_ns=0)
    urgent = make_sample("urgent", [1] * 7, 9, priority=-(2**31), arrival_ns=1, order=1)
    world.add(old)
    world.dispatch()
    world.add(urgent)
    while world.num_preemptions == 0:
        plan = world.dispatch()
        if plan.preempted is None:
            world.land()
    assert plan.preempted is urgent
    world.run_to_the_end()


def test_short_prompt_is_not_blocked_by_long_prefill() -> None:
    world = World(make_limits(max_tokens=16, max_running=8), 256)
    longs = [make_sample(f"long{index}", [index, *range(400)], order=index) for index in range(3)]
    for long in longs:
        long.request = with_shared(long.request, source="a user")
    world.add(*longs)
    world.dispatch()
    short = make_sample("short", [5, 5, 5], order=9)
    short.request = with_shared(short.request, source="a user")
    world.add(short)
    plan = world.dispatch()
    assert row_of(plan, short) == (0, 3, True)
    assert row_of(plan, longs[0]) == (16, 13, False)
    assert row_of(plan, longs[1]) is row_of(plan, longs[2]) is None  # they wait in their place
    world.run_to_the_end()


def test_long_prompt_progresses_beside_endless_short_ones() -> None:
    world = World(make_limits(max_tokens=16, max_running=8, has_prefix_cache=False), 256)
    long = make_sample("long", [*range(160)], max_tokens=1)
    long.request = with_shared(long.request, source="a user")
    world.add(long)
    for order in range(1, 400):
        short = make_sample(f"short{order}", [order] * 5, 1, order=order)
        short.request = with_shared(short.request, source="a user")
        world.add(short)
        before = long.num_computed
        world.dispatch()
        world.land()
        if long.state is SequenceState.FINISHED:
            break
        assert long.num_computed >= min(160, before + 4), "a quarter of the step"
    assert order <= 41


def test_users_share_a_step_alike() -> None:
    world = World(make_limits(max_tokens=32, max_running=8, has_prefix_cache=False), 512)
    for order in range(6):
        sample = make_sample(f"many{order}", [1] * 30, order=order)
        sample.request = with_shared(sample.request, source="many")
        world.add(sample)
    one = make_sample("one", [1] * 100, order=9)
    world.add(one)
    assert row_of(world.dispatch(), one) == (0, 16, False)


def limited(max_running: int = 8, **fields: int) -> World:
    limits = replace(make_limits(max_tokens=32, max_running=max_running, has_prefix_cache=False), **fields)
    return World(limits, 512)


def test_long_prefill_token_threshold_caps_a_prompt() -> None:
    world = limited(long_prefill_tokens=6)
    long, short = make_sample("long", [1] * 40), make_sample("short", [1] * 6, order=1)
    world.add(long, short)
    plan = world.dispatch()
    assert (row_of(plan, long), row_of(plan, short)) == ((0, 6, False), (0, 6, True))


@pytest.mark.parametrize("most", [1, 2])
def test_max_long_partial_prefills(most: int) -> None:
    """Shorter prompts overtake the long ones that wait."""
    world = limited(long_prefill_tokens=8, max_long_prefills=most)
    samples = [make_sample(f"s{order}", [1] * size, order=order) for order, size in enumerate([40, 40, 40, 5])]
    for sample in samples:
        sample.request = with_shared(sample.request, source="a user")
    world.add(*samples)
    rows = {row.sequence.request.own.request_id for row in world.dispatch().rows}
    assert rows == {*(f"s{order}" for order in range(most)), "s3"}


def test_max_num_partial_prefills() -> None:
    world = limited(max_partial_prefills=1)
    long, other, short = (make_sample(f"s{order}", [1] * size, order=order) for order, size in enumerate([31, 31, 5]))
    world.add(long, other, short)
    rows = [row.sequence for row in world.dispatch().rows]
    assert short in rows
    assert sum(each in rows for each in (long, other)) == 1


def test_steps_beside_a_stream_are_bounded_by_time() -> None:
    world, stream = world_with_stream(num_tokens=400)
    world.cost = StepCost(100_000_000)
    decode, prompt = StepLoad(num_decodes=1), StepLoad()
    prompt.add_prompt(0, 100)
    world.cost.measured(decode, 1_000_000)
    world.cost.measured(prompt, 10_000_000)  # 0.1 ms a token
    world.cost.dispatched(decode)
    long, short = make_sample("long", [*range(500)], 1, order=1), make_sample("short", [*range(300)], order=2)
    world.add(long, short)
    plan = world.dispatch()
    assert row_of(plan, stream) is not None
    rows = [row_of(plan, long), row_of(plan, short)]
    assert None not in rows
    num_long, num_short = (row[1] for row in rows if row is not None)
    assert 8 <= num_long <= 20  # about as long as the step takes without prompts
    assert num_short == 300  # within the 100 ms


def of_source(source: str, name: str, order: int) -> Sequence:
    sequence = make_sample(name, [order + 1, 2, 3], max_tokens=100, arrival_ns=order, order=order)
    sequence.request = with_shared(sequence.request, source=source)
    return sequence


def test_starving_source_gets_a_slot_of_the_largest() -> None:
    world = World(make_limits(max_tokens=64, max_running=4), 256)
    flood = [of_source("flood", f"flood{number}", number) for number in range(6)]
    other = of_source("other", "other0", 6)
    world.add(*flood[:3], other, *flood[3:])
    for _ in range(4):
        world.dispatch()
        world.land()
    assert [each.request.shared.source for each in world.batch.running].count("flood") == 3
    late = of_source("late", "late", 7)
    world.add(late)
    for _ in range(4):
        world.dispatch()
        world.land()
    assert world.num_preemptions == 0  # it has not waited long
    world.starving_before_ns = 8
    for _ in range(6):
        world.dispatch()
        world.land()
    assert late in world.batch.running
    assert world.num_preemptions == 1
    assert flood[0] in world.batch.running
    assert other in world.batch.running
    for _ in range(20):  # nothing is thrown out for sources that have a slot
        world.dispatch()
        world.land()
    assert world.num_preemptions == 1


def test_priority_then_arrival() -> None:
    world = World(make_limits(max_running=2), 64)
    late, early, urgent = (
        make_sample("late", [1], arrival_ns=9, order=0),
        make_sample("early", [1], arrival_ns=1, order=1),
        make_sample("urgent", [1], priority=-1, arrival_ns=99, order=2),
    )
    world.add(late, early, urgent)
    assert [row.sequence for row in world.dispatch().rows] == [urgent, early]


def test_request_without_room_is_not_overtaken() -> None:
    world = World(make_limits(), 4)
    big, small = make_sample("big", [1] * 13, max_tokens=1), make_sample("small", [1], order=1)
    world.add(make_sample("now", [1] * 4, order=-1))
    world.dispatch()
    world.add(big, small)
    assert [row.sequence.request.own.request_id for row in world.dispatch().rows] == ["now"]


def test_last_in_order_is_preempted_and_requeued() -> None:
    world = World(make_limits(max_tokens=64, max_running=3, has_prefix_cache=False), 6)
    sequences = [make_sample(name, [1] * 7, max_tokens=9, order=order) for order, name in enumerate("ab")]
    world.add(*sequences)
    for _ in range(100):
        plan = world.dispatch()
        if plan.preempted is not None:
            break
        world.land()
    assert plan.preempted is sequences[1]
    assert row_of(plan, sequences[1]) is None
    world.run_to_the_end()


def test_no_preemption_while_blocks_are_returning() -> None:
    world = World(make_limits(max_tokens=64, has_prefix_cache=False), 6)
    sequences = [make_sample(name, [1] * 7, max_tokens=9, order=order) for order, name in enumerate("ab")]
    world.add(*sequences)
    while world.num_preemptions == 0:
        world.dispatch()
        if len(world.flights) == 3:
            world.land()
    assert world.batch.num_leaving == 1
    assert world.plan().preempted is None


def test_cached_prompt_recomputes_its_last_token() -> None:
    world = World(make_limits(max_tokens=64), 16)
    world.add(make_sample("a", list(range(8)), max_tokens=1))
    world.dispatch()
    world.land()
    again, longer = make_sample("b", list(range(8))), make_sample("c", list(range(9)))
    world.add(again, longer)
    plan = world.dispatch()
    assert row_of(plan, again) == (4, 4, True)
    assert row_of(plan, longer) == (8, 1, True)


def test_prompt_logprobs_need_the_prompt_computed() -> None:
    world = World(make_limits(max_tokens=64), 16)
    world.add(make_sample("a", list(range(8)), max_tokens=1))
    world.dispatch()
    world.land()
    sequence = make_sample("b", list(range(8)), num_prompt_logprobs=0)
    world.add(sequence)
    assert row_of(world.dispatch(), sequence) == (0, 8, True)


def test_prompt_logprobs_fit_the_record_of_a_result() -> None:
    """A worker that could not send its result would die of it, again after each restart."""
    world = World(replace(make_limits(max_tokens=64), max_result_bytes=10 * 168), 64)
    greedy, other = (make_sample(name, list(range(20)), num_prompt_logprobs=20, order=i) for i, name in enumerate("ab"))
    plain = make_sample("c", [1] * 20, order=2)
    world.add(greedy, other, plain)
    plans = [world.dispatch(), world.dispatch()]
    assert [[(row.sequence, row.num_tokens) for row in plan.rows] for plan in plans] == [
        [(greedy, 10), (plain, 20)],
        [(plain, 1), (greedy, 10)],
    ]
    world.land()
    world.land()
    assert [(row.sequence, row.num_tokens) for row in world.dispatch().rows] == [(greedy, 1), (plain, 1), (other, 9)]


def test_siblings_wait_for_the_prompt_they_share() -> None:
    world = World(make_limits(max_tokens=16), 64)
    siblings = [make_sample(f"s{index}", list(range(20)), order=index, group_id="g") for index in range(3)]
    other = make_sample("other", [7], order=9)
    world.add(*siblings, other)
    assert [row.sequence for row in world.dispatch().rows] == [siblings[0], other]
    plan = world.dispatch()
    assert {row.sequence.request.own.request_id for row in plan.rows} == {"s0", "other"}
    world.land()
    assert siblings[1] not in [row.sequence for row in world.dispatch().rows]
    world.land()
    plan = world.dispatch()
    assert row_of(plan, siblings[1]) == (16, 4, True)
    assert row_of(plan, siblings[2]) == (16, 4, True)


def test_without_prefix_cache_siblings_start_at_once() -> None:
    world = World(make_limits(max_tokens=64, has_prefix_cache=False), 64)
    siblings = [make_sample(f"s{index}", list(range(20)), order=index, group_id="g") for index in range(3)]
    world.add(*siblings)
    assert len(world.dispatch().rows) == 3


def test_a_slow_reader_gets_no_tokens() -> None:
    world = World(make_limits(), 64)
    slow, fast, new_request = (make_sample(name, [1, 2], order=order) for order, name in enumerate(["slow", "fast", "new"]))
    world.add(slow, fast)
    world.dispatch()
    for sequence in (slow, new_request):
        assert isinstance(sequence.reader, ListReader)
        sequence.reader.is_slow = True
    world.add(new_request)
    assert [row.sequence for row in world.dispatch().rows] == [fast]


def test_starts_are_limited_by_the_record() -> None:
    limits = Limits(64, 8, 2 * start_bytes(1) + 50, 1 << 20, 4, True)
    world = World(limits, 64)
    world.add(*(make_sample(f"s{order}", [1], order=order) for order in range(5)))
    assert [len(world.dispatch().admitted) for _ in range(3)] == [2, 2, 1]
    world.flights.clear()
    world.batch.rollback_in_flight()  # a rank came back: all are started again
    assert [sum(not row.start for row in world.dispatch().rows) for _ in range(3)] == [2, 2, 1]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_end_is_known_ahead(max_tokens: int) -> None:
    sequence = make_sample("a", [1, 2, 3], max_tokens=max_tokens)
    row = next_row(sequence, 0, 16)
    assert row == SequenceChunk(sequence, 0, 3, max_tokens == 1)
    sequence.num_unknown = max_tokens
    assert next_row(sequence, 3, 16) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 40), st.data())
def test_no_request_starves(max_wait_ns: int, max_running: int, victim_priority: int, data: st.DataObject) -> None:
    """Better priorities arrive for ever, faster than they are served. A request that arrives `max_wait_ns` after another one
    never runs while that one waits, however little room there is and whatever is preempted; so every request ends after
    finitely many."""
    world = World(make_limits(max_tokens=8, max_running=max_running, has_prefix_cache=False), 2 * max_running + 1)
    victim = make_sample("victim", [1] * 4, 4, victim_priority, max_wait_ns=max_wait_ns)
    world.add(victim)
    rival_priorities = st.integers(-1000, -1)
    for now_ns in range(40 * max_wait_ns + 400):
        priority = data.draw(rival_priorities) if now_ns < 20 else -7
        world.add(make_sample(f"r{now_ns}", [1] * 3, 3, priority, now_ns, now_ns + 1, max_wait_ns=max_wait_ns))
        if victim.state in (SequenceState.WAITING, SequenceState.LEAVING):
            assert all(rival.request.shared.arrival_ns < max_wait_ns for rival in world.batch.running)
        for _ in range(2 - len(world.flights)):
            world.dispatch()
        world.land()
        if victim.state is SequenceState.FINISHED:
            return
    raise AssertionError(f"the victim is {victim.state} after {now_ns} rivals")


PRIORITIES = st.integers(-(2**31), 2**31)


@given(PRIORITIES, PRIORITIES, st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_place_in_line(first: int, second: int, arrival_ns: int, later_ns: int, max_wait_ns: int) -> None:
    """The better priority goes first, unless the other has waited `max_wait_ns` longer."""
    place = place_in_line(first, arrival_ns, max_wait_ns)
    assert place <= place_in_line(second, arrival_ns + later_ns + max_wait_ns, max_wait_ns)
    assert place_in_line(max(first, second), 5, max_wait_ns) >= place_in_line(min(first, second), 5, max_wait_ns)
    assert [place_in_line(level, 0, 30 * 10**9) / 1e9 for level in (-1, 0, 1, 14)] == [-1, 0, 1, 7.5]


PROMPTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(-1, 1), st.sampled_from(["", "", "g"])),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    PROMPTS,
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 6),
)
def test_all_requests_end_in_the_smallest_pool(
    prompts: list[tuple[int, int, int, str]], budget: int, max_running: int, block_size: int, has_cache: bool, spare_blocks: int
) -> None:
    longest = max(num_prompt + max_tokens for num_prompt, max_tokens, _, _ in prompts)
    world = World(make_limits(budget, max_running, block_size, has_cache), -(-longest // block_size) + spare_blocks)
    for order, (num_prompt, max_tokens, priority, group_id) in enumerate(prompts):
        tokens = [1] * num_prompt
        world.add(make_sample(f"s{order}", tokens, max_tokens, priority, arrival_ns=order % 3, order=order, group_id=group_id))
    world.run_to_the_end()


def num_new_blocks(world: World, plan: SchedulerOutput) -> int:
    """Return the number of blocks that the chunks of a plan will take."""
    size, found = world.limits.block_size, {id(each.sequence): each.prefix.num_blocks for each in plan.admitted}
    held = [found[id(row.sequence)] if id(row.sequence) in found else len(row.sequence.tables[0]) for row in plan.rows]
    needed = [max(row.end, 0 if id(row.sequence) not in found else row.sequence.num_tokens) for row in plan.rows]
    return sum(max(0, -(-end // size) - num) for end, num in zip(needed, held, strict=True))


@settings(max_examples=150)
@given(PROMPTS, st.integers(1, 24), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(1, 6))
def test_drafts_take_only_spare_resources(
    prompts: list[tuple[int, int, int, str]], budget: int, max_running: int, block_size: int, spare_blocks: int, num_wanted: int
) -> None:
    """Rows, admissions and the preempted sequence in any state are those of a step without drafts; drafts get only spare tokens
    and blocks, and give blocks back before a sequence is preempted."""
    longest = max(num_prompt + max_tokens for num_prompt, max_tokens, _, _ in prompts)
    limits = replace(make_limits(budget, max_running, block_size, False), max_drafts=64)
    world = World(limits, -(-longest // block_size) + spare_blocks, num_wanted)
    for order, (num_prompt, max_tokens, priority, _) in enumerate(prompts):
        world.add(make_sample(f"s{order}", [1] * num_prompt, max_tokens, priority, arrival_ns=order % 3, order=order))
    plan_of = world.plan

    def compared() -> SchedulerOutput:
        running, waiting = list(world.batch.running), list(world.batch.waiting)
        for sequence in running:
            sequence.num_wanted = 0
        plain = plan_of()
        for sequence in running:
            sequence.num_wanted = num_wanted
        plan = plan_of()
        assert plan.preempted is plain.preempted
        assert [each.sequence for each in plan.admitted] == [each.sequence for each in plain.admitted]
        assert [(row.sequence, row.start, row.num_tokens) for row in plan.rows] == [
            (row.sequence, row.start, row.num_tokens) for row in plain.rows
        ]
        assert not any(row.num_drafts for row in plain.rows)
        assert sum(row.num_tokens + row.num_drafts for row in plan.rows) <= budget
        taken, num_all = num_new_blocks(world, plan), len(running) + len(plan.admitted)
        if taken > num_new_blocks(world, plain):
            assert taken + num_all <= world.batch.pool.num_free, "each running sequence finds a block to grow into"
            has_slots = num_all + world.batch.num_leaving < max_running
            assert not (has_slots and len(waiting) > len(plan.admitted)), "what waits may want it"
        if plan.preempted is not None:
            assert all(len(each.tables[0]) <= -(-each.num_tokens // block_size) for each in running)
        return plan

    world.plan = compared  # type: ignore[method-assign]
    world.run_to_the_end()


def pooled_sample(name: str, num_tokens: int, num_bytes: int, is_whole: bool = False) -> Sequence:
    """Return a prompt without an answer and with `num_bytes` of a result."""
    sequence = make_sample(name, [*range(num_tokens)], max_tokens=0)
    sequence.num_pooled_bytes, sequence.is_pooled_whole = num_bytes, is_whole
    return sequence


def test_pooled_values_fit_the_result() -> None:
    """The last token of a prompt waits for a step with room in its result; other tokens do not."""
    world = World(replace(make_limits(max_tokens=64), max_result_bytes=100), 100)
    world.add(pooled_sample("a", 6, 60), pooled_sample("b", 7, 60), pooled_sample("c", 9, 40))
    rows = world.dispatch().rows
    assert sorted((row.sequence.request.own.request_id, row.num_tokens) for row in rows) == [("a", 6), ("b", 6), ("c", 9)]
    assert [(row.sequence.request.own.request_id, row.num_tokens) for row in world.dispatch().rows] == [("b", 1)]


def test_whole_prompts_are_never_cut() -> None:
    world = World(replace(make_limits(max_tokens=10, has_prefix_cache=False), are_prompts_whole=True), 100)
    world.add(pooled_sample("a", 6, 4), pooled_sample("b", 7, 4), pooled_sample("c", 3, 4))
    steps = [[(row.sequence.request.own.request_id, row.num_tokens) for row in world.dispatch().rows] for _ in range(2)]
    assert steps[0] == [("a", 6)]  # b is next in line, and c does not go before it
    assert sorted(steps[1]) == [("b", 7), ("c", 3)]


@pytest.mark.parametrize(("is_whole", "start"), [(True, 0), (False, 8)])
def test_lost_mean_is_recomputed(is_whole: bool, start: int) -> None:
    """A last token's state is still in the KV cache."""
    world = World(make_limits(max_tokens=8), 100)
    world.add(pooled_sample("a", 20, 4, is_whole))
    world.dispatch()
    world.land()
    world.dispatch()
    world.batch.rollback_in_flight()
    world.flights.clear()
    assert [(row.start, row.num_tokens) for row in world.dispatch().rows] == [(start, 8)]
    world.run_to_the_end()
