"""Prompts share a step: none is blocked, and neither tokens nor time are given out twice."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prefill_shares import MIN_TOKENS, Prefill, share
from engine.scheduler.step_cost import StepCost, StepLoad

PREFILLS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100_000), st.integers(1, 5000)), min_size=1, max_size=10)


def known_cost() -> StepCost:
    """Return a cost of 10 microseconds a token, and 10 more for each 4,096 keys."""
    cost = StepCost(100_000_000)
    for _ in range(400):
        for start in (0, 50_000, 100_000):
            load = StepLoad()
            load.add_prompt(start, 16)
            cost.measured(load, int(16 * 10_000 * (1 + (start + 8) / 4096)))
    return cost


@given(PREFILLS, st.integers(1, 4096), st.one_of(st.just(math.inf), st.integers(1, 10**8)))
def test_all_tokens_are_shared_and_no_more(wanted: list[tuple[str, int, int]], num_tokens: int, time_ns: float) -> None:
    prefills = [Prefill(*each) for each in wanted]
    cost = known_cost()
    share(prefills, num_tokens, time_ns, cost)
    given_tokens = sum(each.num_tokens for each in prefills)
    assert all(0 <= each.num_tokens <= each.num_due for each in prefills)
    assert given_tokens <= num_tokens
    if math.isinf(time_ns):
        assert given_tokens == min(num_tokens, sum(each.num_due for each in prefills))
    assert prefills[0].num_tokens > 0 or num_tokens < len(prefills), "the oldest makes progress"
    taken_ns = sum(cost.prompt_ns(each.start, each.num_tokens) for each in prefills)
    least_ns = sum(cost.prompt_ns(each.start, MIN_TOKENS) for each in prefills)
    assert taken_ns <= time_ns + least_ns


def test_short_prompts_of_a_source_go_first() -> None:
    long, second, short = Prefill("a", 0, 5000), Prefill("a", 0, 5000), Prefill("a", 0, 30)
    share([long, second, short], 64, math.inf, StepCost(0))
    assert (short.num_tokens, long.num_tokens, second.num_tokens) == (30, 16, 18)


def test_sources_share_alike() -> None:
    many, one = [Prefill("many", 0, 100) for _ in range(9)], Prefill("one", 0, 100)
    share([*many, one], 60, math.inf, StepCost(0))
    assert one.num_tokens == 30
