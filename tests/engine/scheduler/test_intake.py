"""New requests where ranks share experts: which are held and until when, and prefill apart from decode."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.scheduler.intake import Intake, StepKind
from engine.scheduler.policy import SchedulerOutput, schedule
from engine.scheduler.sequence import Sequence
from tests.engine.scheduler.sequences import make_limits, make_sample
from tests.engine.scheduler.simulation import Simulation, Stream, ints, simulate
from tests.engine.scheduler.test_policy import World

TIMEOUT_NS = 100
HELD_FOREVER = {"enable_expert_parallel": True, "ep_batched_token_timeout_ms": 3_600_000}


@dataclass
class RankGroupWorld(World):
    """A replica of a rank group with a clock of its own; added sequences arrive at its time."""

    kind: StepKind = StepKind.MIXED
    now_ns: int = 1
    is_rest_idle: bool = False  # the other replicas
    kinds: list[StepKind] = field(default_factory=list)  # of the steps so far
    held_until_ns: int = 0

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            sequence.held_since_ns = self.now_ns
        super().add(*sequences)

    def plan(self) -> SchedulerOutput:
        batch = self.batch
        intake = Intake(TIMEOUT_NS, self.now_ns, self.is_rest_idle and not len(batch.running))
        kinds = (self.kind,) if self.kind is StepKind.MIXED else (self.kind.next, self.kind)
        plan = schedule(
            batch.running,
            batch.waiting,
            batch.leaders,
            batch.pool,
            self.limits,
            batch.num_leaving,
            kinds=kinds,
            intake=intake,
            passed_over=self.passed_over,
        )
        self.held_until_ns = plan.held_until_ns
        return plan

    def check(self, plan: SchedulerOutput) -> None:
        super().check(plan)
        if plan.rows:
            self.kind = plan.kind
            self.kinds.append(plan.kind)
        if plan.kind is not StepKind.MIXED:
            assert {row.is_prefill for row in plan.rows} <= {plan.kind is StepKind.PREFILL}
        if plan.held_until_ns:  # unlike a sequence that waits for another of its group
            held = [sequence for sequence in self.batch.waiting if sequence.held_since_ns and not sequence.request.own.group_id]
            assert all(plan.held_until_ns <= sequence.held_since_ns + TIMEOUT_NS for sequence in held)
            assert self.now_ns < plan.held_until_ns
            assert not plan.admitted

    def run_to_the_end(self, max_steps: int = 5000) -> None:
        """Run to the end; while nothing else can happen, the clock advances to the end of the next hold."""
        for _ in range(max_steps):
            while len(self.flights) < 2:
                plan = self.dispatch()
                if not plan.rows and plan.preempted is None:
                    break
            self.now_ns += 1
            if self.flights:
                self.land()
            elif self.held_until_ns:
                self.now_ns = self.held_until_ns
            else:
                break
        assert not self.batch.sequences, f"{len(self.batch.sequences)} sequences never end"
        assert self.batch.pool.num_free == self.num_pages


def started(world: RankGroupWorld, num_samples: int = 1, max_tokens: int = 1000) -> RankGroupWorld:
    """Return the world with sequences that have been decoding for long."""
    world.add(*(make_sample(f"old{index}", [5], max_tokens, order=-9 + index) for index in range(num_samples)))
    world.now_ns += TIMEOUT_NS
    world.dispatch()
    world.now_ns += 10 * TIMEOUT_NS
    return world


# ---------------------------------------------------------------------------------------------------------- held requests


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 700))
def test_the_time_counts_from_the_first(since_ns: list[int], now_ns: int) -> None:
    sequences = [make_sample(f"s{index}", [1]) for index in range(len(since_ns))]
    for sequence, held_since_ns in zip(sequences, since_ns, strict=True):
        sequence.held_since_ns = min(held_since_ns, now_ns)
    until_ns = min(sequence.held_since_ns for sequence in sequences) + TIMEOUT_NS
    expected = until_ns if until_ns > now_ns else 0
    assert Intake(TIMEOUT_NS, now_ns, False).held_until_ns(sequences, {}) == expected
    assert Intake(TIMEOUT_NS, now_ns, True).held_until_ns(sequences, {}) == 0
    assert Intake(0, now_ns, False).held_until_ns(sequences, {}) == 0
    sequences[-1].held_since_ns = 0  # it was admitted before
    assert Intake(TIMEOUT_NS, now_ns, False).held_until_ns(sequences, {}) == 0


def test_later_ones_do_not_hold_up_the_first() -> None:
    world = started(RankGroupWorld(make_limits(max_tokens=64, max_running=8), 64))
    begin_ns = world.now_ns
    for order in range(4):
        world.add(make_sample(f"s{order}", [1, 2, 3], order=order))
        assert [row.sequence.request.own.request_id for row in world.dispatch().rows] == ["old0"]
        assert world.held_until_ns == begin_ns + TIMEOUT_NS
        world.land()
        world.now_ns += TIMEOUT_NS // 4
    assert len(world.dispatch().admitted) == 4
    assert world.held_until_ns == 0


@pytest.mark.parametrize(
    ("limits", "num_blocks", "lengths", "num_admitted"),
    [
        (make_limits(max_tokens=13, max_running=8), 64, [5, 5], 0),  # 12 are left beside the decode
        (make_limits(max_tokens=13, max_running=8), 64, [5, 5, 5], 3),  # tokens: of the last one 2
        (make_limits(max_tokens=13, max_running=8), 64, [5, 5, 2], 3),
        (make_limits(max_tokens=64, max_running=3), 64, [5], 0),
        (make_limits(max_tokens=64, max_running=3), 64, [5, 5], 2),  # slots
        (make_limits(max_tokens=64, max_running=3), 64, [5, 5, 5], 2),
        (make_limits(max_tokens=64, max_running=8), 9, [5, 5], 0),
        (make_limits(max_tokens=64, max_running=8), 9, [5, 5, 9], 2),  # blocks: the last one lacks some
    ],
)
def test_prompts_that_fill_a_step_are_admitted(limits: Any, num_blocks: int, lengths: list[int], num_admitted: int) -> None:
    """Held requests, and those without room, do not count: the same prompts are admitted once the time is over."""
    world = started(RankGroupWorld(limits, num_blocks))
    world.add(*(make_sample(f"s{order}", [7 + order] * length, order=order) for order, length in enumerate(lengths)))
    plan = world.plan()
    assert (len(plan.admitted), bool(plan.held_until_ns)) == (num_admitted, not num_admitted)
    assert len(plan.rows) == 1 + num_admitted
    assert world.batch.num_waiting == len(lengths)
    world.now_ns += TIMEOUT_NS
    assert len(world.plan().admitted) == (num_admitted or len(lengths))


def test_held_requests_leave_drafts_their_room() -> None:
    """Held requests take no tokens and no blocks of a step from drafts of running sequences."""

    def drafts_with(num_waiting: int) -> int:
        world = started(RankGroupWorld(replace(make_limits(max_tokens=16, max_running=8), max_drafts=16), 9))
        world.land()
        world.batch.running[0].num_wanted = 8
        world.add(*(make_sample(f"s{order}", [7 + order] * 12, order=order) for order in range(num_waiting)))
        plan = world.plan()
        assert bool(plan.held_until_ns) == bool(num_waiting)
        return plan.rows[0].num_drafts

    assert drafts_with(1) == drafts_with(0) == 8


def test_the_wait_counts_from_the_clock(directory: Path) -> None:
    """A new request that is alone is admitted when its time is over, and not before."""
    options = {"enable_expert_parallel": True, "ep_batched_token_timeout_ms": 150, "max_model_len": 8192, "num_kv_blocks": 2200}
    with simulate(directory, **options) as simulation:
        simulation.start(simulation.submit([1, 2, 3], max_tokens=8000))
        begin_ns = time.monotonic_ns()
        late = simulation.submit([4, 5, 6], max_tokens=2)
        simulation.run_until(lambda: simulation.scheduler._held_until_ns, "it is held", timeout_s=10)
        until_ns = simulation.scheduler._held_until_ns
        assert begin_ns + 150_000_000 <= until_ns <= time.monotonic_ns() + 150_000_000
        assert simulation.scheduler.deadline_ns() <= until_ns, "the loop wakes for it"
        simulation.start(late)
        assert time.monotonic_ns() >= until_ns


def test_preempted_requests_count_as_waiting() -> None:
    world = World(make_limits(max_tokens=64), 64)
    world.add(make_sample("a", [1, 2, 3]), make_sample("b", [4, 5], order=1))
    world.dispatch()
    world.batch.preempt(world.batch.running[-1])
    assert world.batch.num_leaving == 1, "a step in flight has a row of it"
    assert world.batch.num_waiting == 1
    world.land()
    assert (world.batch.num_leaving, world.batch.num_waiting) == (0, 1)


def test_idle_rank_group_holds_no_request() -> None:
    world = RankGroupWorld(make_limits(max_tokens=64), 64)
    world.add(make_sample("a", [1, 2, 3]))
    assert world.plan().held_until_ns == world.now_ns + TIMEOUT_NS  # others compute
    world.is_rest_idle = True
    assert len(world.dispatch().admitted) == 1
    world.add(make_sample("b", [1, 2, 3]))
    assert world.plan().held_until_ns > 0


def test_request_joins_running_prompts() -> None:
    world = started(RankGroupWorld(make_limits(max_tokens=16), 64))
    world.add(make_sample("long", [1] * 20, order=1))
    assert [row.num_tokens for row in world.dispatch().rows] == [1, 15]
    world.add(make_sample("late", [2, 3], order=2))
    assert [row.sequence.request.own.request_id for row in world.dispatch().rows] == ["old0", "long", "late"]


def test_preempted_sequence_is_not_held() -> None:
    """A preempted sequence, and one of a group that runs already; held ones are admitted along with them."""
    world = RankGroupWorld(make_limits(max_tokens=64, max_running=8, has_prefix_cache=False), 64, is_rest_idle=True)
    world.add(make_sample("a", [5], group_id="g"), make_sample("b", [5], order=1))
    world.dispatch()
    world.land()
    world.is_rest_idle = False
    world.batch.preempt(world.batch.running[-1])
    assert [admission.sequence.request.own.request_id for admission in world.dispatch().admitted] == ["b"]
    world.add(make_sample("c", [1, 2], order=2))
    assert not world.dispatch().admitted
    world.add(make_sample("d", [1, 2], order=3, group_id="g"))
    assert [admission.sequence.request.own.request_id for admission in world.dispatch().admitted] == ["c", "d"]


# ---------------------------------------------------------------------------------------------- prefill apart from decode


def test_prefill_and_decode_take_turns() -> None:
    world = started(RankGroupWorld(make_limits(max_tokens=4), 64, kind=StepKind.DECODE))
    world.add(make_sample("long", [1] * 12, max_tokens=2))
    world.land()
    for _ in range(7):
        world.dispatch()
        world.land()
    assert world.kinds == [StepKind.PREFILL, *[StepKind.DECODE, StepKind.PREFILL] * 3, StepKind.DECODE]


PROMPTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(-1, 1), st.sampled_from(["", "", "g"]), st.integers(0, 90)),
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
    st.booleans(),
    st.booleans(),
)
def test_everything_ends_whoever_is_held(
    prompts: list[tuple[int, int, int, str, int]],
    budget: int,
    max_running: int,
    block_size: int,
    has_cache: bool,
    spare_blocks: int,
    is_apart: bool,
    is_rest_idle: bool,
) -> None:
    longest = max(num_prompt + max_tokens for num_prompt, max_tokens, _, _, _ in prompts)
    limits = make_limits(budget, max_running, block_size, has_cache)
    kind = StepKind.DECODE if is_apart else StepKind.MIXED
    world = RankGroupWorld(limits, -(-longest // block_size) + spare_blocks, kind=kind, is_rest_idle=is_rest_idle)
    for order, (num_prompt, max_tokens, priority, group_id, pause_ns) in enumerate(prompts):
        world.now_ns += pause_ns
        sample = make_sample(f"s{order}", [1] * num_prompt, max_tokens, priority, order % 3, order, group_id)
        world.add(sample)
        if pause_ns % 3:
            world.dispatch()
        if len(world.flights) > 1:
            world.land()
    world.run_to_the_end()
    if is_apart:  # no request waits for two steps of the other kind in vain
        assert set(world.kinds) <= {StepKind.PREFILL, StepKind.DECODE}


# --------------------------------------------------------------------------------------------------- the scheduler itself


def turn_often(simulation: Simulation) -> None:
    for _ in range(10):
        simulation.turn()


def submit(simulation: Simulation, count: int, length: int = 5, **options: Any) -> list[Stream]:
    return [simulation.submit([index + 1] * length, seed=index, **options) for index in range(count)]


def test_held_requests_are_counted(directory: Path) -> None:
    """The loop sleeps until the first one's time; later requests do not change it. One that fills a step ends the wait."""
    with simulate(directory, **HELD_FOREVER) as simulation:
        first = simulation.submit([1, 2, 3], max_tokens=200)
        simulation.start(first)
        held = submit(simulation, 1, max_tokens=4)
        turn_often(simulation)
        deadline_ns = simulation.scheduler.deadline_ns()
        assert deadline_ns > 0
        held += submit(simulation, 2, max_tokens=4)
        turn_often(simulation)
        assert simulation.scheduler.deadline_ns() == deadline_ns
        assert (simulation.metric("num_requests_waiting"), simulation.metric("num_requests_running")) == (3, 1)
        assert not any(stream.admissions for stream in held)
        held += submit(simulation, 4, max_tokens=4)  # 7 times 5 tokens beside the one of the first
        simulation.finish(*held)
        assert max(len(step.starts) for step in simulation.rank.steps) == 7
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_held_request_is_admitted_when_the_last_ends(directory: Path) -> None:
    with simulate(directory, **HELD_FOREVER) as simulation:
        first = simulation.submit([1, 2, 3], max_tokens=40)
        simulation.start(first)
        simulation.finish(first, *submit(simulation, 1))
        simulation.check()


def test_hold_ends_at_its_deadline(directory: Path) -> None:
    """The loop wakes at its own deadline although another replica computes all the time."""
    with simulate(directory, enable_expert_parallel=True, ep_batched_token_timeout_ms=5, data_parallel_size=2) as simulation:
        simulation.segments.counters.counter("num_requests_running", "scheduler1").set(2)
        stream = simulation.submit([1, 2, 3])
        turn_often(simulation)
        while not stream.is_over:
            simulation.loop.wait()
            simulation.turn()
        simulation.check()


def test_request_is_held_while_another_replica_runs(directory: Path) -> None:
    with simulate(directory, data_parallel_size=2, **HELD_FOREVER) as simulation:
        other = simulation.segments.counters.counter("num_requests_running", "scheduler1")
        other.set(2)
        stream = simulation.submit([1, 2, 3])
        turn_often(simulation)
        assert (simulation.metric("num_requests_waiting"), stream.admissions) == (1, [])
        other.set(0)
        simulation.finish()
        simulation.check()


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 18, "max_num_batched_tokens": 7}], ids=["all", "preempted"])
def test_no_step_has_both(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, enable_expert_parallel=True, ep_mixed_steps=False, **options) as simulation:
        for length in (3, 20, 9):
            submit(simulation, 6, length, max_tokens=30)
            simulation.start(*list(simulation.streams.values())[:2])
        simulation.finish()
        simulation.check()
        simulation.check_idle()
        assert (simulation.metric("num_preemptions_total") > 0) == bool(options)
        kinds, slots = set(), dict[int, tuple[int, int]]()  # prompt, and tokens so far
        for step in simulation.rank.steps:
            begun = {start.slot: (start.num_prompt_tokens, len(start.token_ids) // 4) for start in step.starts}
            slots |= begun
            rows = list(zip(ints(step.slots), ints(step.start), step.is_sampling, strict=True))
            kinds.add(frozenset(slot in begun or start < max(slots[slot][0], slots[slot][1] - 1) for slot, start, _ in rows))
            slots |= {slot: (slots[slot][0], slots[slot][1] + is_sampling) for slot, _, is_sampling in rows}
        assert kinds == {frozenset([True]), frozenset([False])}


def test_answers_go_on_beside_a_long_prompt(directory: Path) -> None:
    options = {"ep_mixed_steps": False, "ep_batched_token_timeout_ms": 0}
    with simulate(directory, enable_expert_parallel=True, **options) as simulation:
        first = simulation.submit([1], max_tokens=100)
        simulation.start(first)
        num_before = len(simulation.rank.steps)
        long = simulation.submit([2] * 200, max_tokens=1)
        simulation.run_until(lambda: long.is_over, "the end of the long one")
        assert not first.is_over
        sizes = [max(ints(step.num_tokens)) for step in simulation.rank.steps[num_before:]]
        chunks = [index for index, size in enumerate(sizes) if size > 1]
        assert [sizes[index] for index in chunks] == [32] * 6 + [8]
        assert {after - before for before, after in itertools.pairwise(chunks)} == {2}
