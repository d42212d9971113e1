"""Estimated times of steps, learned from measured ones."""

from __future__ import annotations

import math

import pytest

from engine.scheduler.step_cost import PROBE_STEPS, StepCost, StepLoad

MS = 1_000_000


def prompt(start: int, num_tokens: int, num_decodes: int = 0) -> StepLoad:
    load = StepLoad(num_decodes)
    load.add_prompt(start, num_tokens)
    return load


def learned() -> StepCost:
    """Return a learned cost: a step takes 2 ms, 10 microseconds a prompt token, and as much again for each 4,096 keys."""
    cost = StepCost(100 * MS)
    for number in range(600):
        cost.measured(StepLoad(2), 2 * MS)
        start = number * 171 % 100_000
        cost.measured(prompt(start, 64, 2), int(2 * MS + 64 * 10_000 * (1 + (start + 32) / 4096)))
    return cost


@pytest.mark.parametrize("start", [0, 5_000, 90_000])
def test_time_per_token_grows_with_context(start: int) -> None:
    cost = learned()
    assert cost.prompt_ns(start, 64) == pytest.approx(64 * 10_000 * (1 + (start + 32) / 4096), rel=0.1)
    assert cost.base_ns == pytest.approx(2 * MS)


@pytest.mark.parametrize("time_ms", [0.1, 1, 50])
@pytest.mark.parametrize("start", [0, 90_000])
def test_tokens_within_a_time_take_that_time(start: int, time_ms: float) -> None:
    cost = learned()
    count = cost.num_tokens_within(start, time_ms * MS)
    assert cost.prompt_ns(start, count) <= time_ms * MS <= cost.prompt_ns(start, count + 1)


def test_long_prompts_take_as_long_as_streams() -> None:
    cost = learned()
    cost.dispatched(StepLoad(2))
    assert cost.long_budget_ns(has_streams=True) == pytest.approx(2 * MS, rel=0.1)
    assert 2 * MS < cost.long_budget_ns(has_streams=False) <= 100 * MS


def test_short_prompts_beside_streams_take_the_longest_step() -> None:
    cost = learned()
    cost.dispatched(StepLoad(2))
    assert cost.prompt_budget_ns(has_streams=True) == pytest.approx(98 * MS, rel=0.1)
    assert cost.prompt_budget_ns(has_streams=False) == math.inf


def test_max_step_time_bounds_slow_models() -> None:
    cost = StepCost(100 * MS)
    cost.measured(prompt(0, 100), 500 * MS)
    cost.measured(StepLoad(1), 80 * MS)
    cost.dispatched(StepLoad(1))
    assert cost.prompt_budget_ns(has_streams=True) == pytest.approx(160 * MS)  # three times a step without prompts
    assert cost.long_budget_ns(has_streams=True) == pytest.approx(80 * MS)
    slow = StepCost(100 * MS)
    slow.measured(prompt(0, 100), 500 * MS)
    slow.measured(StepLoad(1), 20 * MS)
    slow.dispatched(StepLoad(1))
    assert slow.prompt_budget_ns(has_streams=True) == pytest.approx(80 * MS)
    assert slow.long_budget_ns(has_streams=True) == pytest.approx(20 * MS)


def test_some_steps_are_without_prompts() -> None:
    """Otherwise the time of a step without prompts would become unknown."""
    cost = learned()
    cost.dispatched(StepLoad(2))
    for _ in range(PROBE_STEPS):
        assert cost.prompt_budget_ns(has_streams=True) > 0
        cost.dispatched(prompt(0, 8, 2))
    assert cost.prompt_budget_ns(has_streams=True) == 0
    cost.dispatched(StepLoad(2))
    assert cost.prompt_budget_ns(has_streams=True) > 0


def test_one_disturbed_step_changes_little() -> None:
    cost = learned()
    before_ns = cost.prompt_ns(0, 64)
    cost.measured(prompt(0, 64), 10_000 * MS)
    assert cost.prompt_ns(0, 64) < 3 * before_ns


@pytest.mark.parametrize("cost", [StepCost(0), StepCost(100 * MS)], ids=["unbounded", "unmeasured"])
def test_tokens_alone_bound_a_step(cost: StepCost) -> None:
    cost.measured(StepLoad(1), 0)
    assert cost.prompt_budget_ns(has_streams=True) == math.inf
