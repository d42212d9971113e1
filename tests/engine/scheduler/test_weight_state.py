"""The state machine of the weights: every legal way, and a 409 that names the state for every other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import RequestError
from engine.messages import WeightsState
from engine.scheduler.weight_state import WeightState

NORMAL, PAUSED, CLEARED, LOADING = WeightsState

TRANSITIONS: dict[str, Callable[[WeightState], None]] = {
    "pause": WeightState.pause,
    "resume": WeightState.resume,
    "clear": WeightState.clear,
    "begin_load": WeightState.begin_load,
    "finish_load": lambda weights: weights.finish_load("/new", 2),
    "fail_load": WeightState.fail_load,
}
LEGAL = {
    (NORMAL, "pause"): PAUSED,
    (NORMAL, "begin_load"): LOADING,
    (PAUSED, "resume"): NORMAL,
    (PAUSED, "clear"): CLEARED,
    (PAUSED, "begin_load"): LOADING,
    (CLEARED, "begin_load"): LOADING,
    (LOADING, "finish_load"): NORMAL,
    (LOADING, "fail_load"): NORMAL,
}


def weights_in(state: WeightsState) -> WeightState:
    weights = WeightState("/old", 1)
    ways = {NORMAL: [], PAUSED: ["pause"], CLEARED: ["pause", "clear"], LOADING: ["begin_load"]}
    for name in ways[state]:
        TRANSITIONS[name](weights)
    return weights


@pytest.mark.parametrize("state", WeightsState)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_transition_from_every_state(state: WeightsState, name: str) -> None:
    weights = weights_in(state)
    if (state, name) in LEGAL:
        TRANSITIONS[name](weights)
        assert weights.state is LEGAL[state, name]
        return
    with pytest.raises(RequestError, match=state.name) as caught:
        TRANSITIONS[name](weights)
    assert caught.value.status == 409
    assert weights.state is state
    assert (weights.path, weights.version) == ("/old", 1)


@pytest.mark.parametrize(("before", "after"), [(NORMAL, NORMAL), (PAUSED, PAUSED), (CLEARED, NORMAL)])
def test_only_a_pause_outlasts_new_weights(before: WeightsState, after: WeightsState) -> None:
    weights = weights_in(before)
    weights.begin_load()
    weights.finish_load("/new", 2)
    assert (weights.state, weights.path, weights.version) == (after, "/new", 2)


@pytest.mark.parametrize("before", [NORMAL, PAUSED, CLEARED])
def test_a_failed_load_changes_nothing(before: WeightsState) -> None:
    weights = weights_in(before)
    weights.begin_load()
    weights.fail_load()
    assert (weights.state, weights.path, weights.version) == (before, "/old", 1)
