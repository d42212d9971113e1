"""The state machine of the weights: every legal command, a 409 that names the state for every other, and the record after
it."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.messages import WeightsState
from engine.process.run_directory import WeightsRecord
from engine.scheduler.weight_state import WeightState

NORMAL, PAUSED, CLEARED, LOADING = WeightsState
SHOWN = {
    ("pause", NORMAL): PAUSED,
    ("clear the weights", NORMAL): PAUSED,
    ("clear the weights", PAUSED): PAUSED,
    ("resume", PAUSED): LOADING,
    ("resume", CLEARED): LOADING,
    ("load weights", NORMAL): LOADING,
    ("load weights", PAUSED): LOADING,
    ("load weights", CLEARED): LOADING,
    ("repair", NORMAL): LOADING,
    ("repair", PAUSED): LOADING,
    ("repair", CLEARED): CLEARED,
}
ORDERS = sorted({order for order, _ in SHOWN})


def weights_in(state: WeightsState) -> WeightState:
    weights = WeightState(WeightsRecord("/old", 3, 5, state if state is not LOADING else NORMAL, (("/old", 3), ("/older", 2))))
    if state is LOADING:
        weights.begin("load weights")
    return weights


@pytest.mark.parametrize("state", WeightsState)
@pytest.mark.parametrize("order", ORDERS)
def test_every_command_in_every_state(state: WeightsState, order: str) -> None:
    weights = weights_in(state)
    record = weights.record
    if (order, state) in SHOWN:
        weights.begin(order)
        assert weights.state is SHOWN[order, state]
        weights.settle(record)  # it failed
    else:
        with pytest.raises(RequestError, match=state.name) as caught:
            weights.begin(order)
        assert caught.value.status == 409
    assert weights.record == record
    assert weights.state is (record.state if (order, state) in SHOWN else state)


@pytest.mark.parametrize(("before", "after"), [(NORMAL, NORMAL), (PAUSED, PAUSED), (CLEARED, NORMAL)])
def test_only_a_pause_outlasts_new_weights(before: WeightsState, after: WeightsState) -> None:
    weights = weights_in(before)
    weights.settle(weights.with_next_version())
    assert weights.record.last_version == 6
    record = weights.loaded("/new", range(2))
    assert record == WeightsRecord("/new", 6, 6, after, (("/new", 6), ("/new", 6)))
    assert weights.state is before
    weights.settle(record)
    assert (weights.state, weights.path, weights.version) == (after, "/new", 6)


def test_a_load_of_one_rank_leaves_the_other() -> None:
    weights = weights_in(NORMAL)
    weights.settle(weights.with_next_version())
    assert weights.loaded("/new", [1]).ranks == (("/old", 3), ("/new", 6))
