"""Encoder work of a step: balanced, within the budget, with the cost of attention, and split inside large pictures."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from engine.messages.media import SLICE_ROWS
from engine.scheduler.encoder_cost import EncoderCost
from tests.engine.scheduler.simulation import small_config

SHAPE: dict[str, Any] = {"encoder_depth": 12, "encoder_passes": 13, "max_num_batched_encoder_embeds": 10}


def steps(rows: list[int], **fields: Any) -> list[int]:
    """Return the parts of each step."""
    cost = EncoderCost(small_config(Path("/"), **SHAPE | fields))
    found, first, parts = [], 0, cost.parts_of(rows)
    while first < len(parts):
        last = cost.end_after(first, parts)
        found.append(last - first)
        first = last
    return found


def test_equal_passes_are_divided_evenly() -> None:
    """The first one, up to the keys of a layer, costs a quarter."""
    assert steps([10]) == [13]
    assert steps([11]) == [7, 6]
    assert steps([4, 7]) == [7, 6]
    assert steps([24]) == [5, 4, 4]
    assert steps([100]) == [1] * 13
    assert steps([]) == [13]  # features: nothing is computed


def test_attention_over_a_picture_counts() -> None:
    """The cost grows with the square of one large picture, but not of many small ones in one call."""
    whole: dict[str, Any] = {"encoder_whole_layers": (5, 11), "encoder_attention_cost": 0.1}
    assert steps([20], **whole | {"encoder_whole_layers": ()}) == [5, 4, 4]
    assert steps([20], **whole) == [6, 4, 3]  # 5 and 20 a pass, 60 where all is seen: 105, then 60 and 3 x 20, then 40 and 60
    assert steps([2] * 9, **whole) == [7, 6] != steps([18], **whole)


def test_large_picture_is_split_inside() -> None:
    """A step can stop within a pass: steps of a third of a pass each run a third of its rows."""
    rows = 6 * SLICE_ROWS
    budget: dict[str, Any] = {"max_num_batched_encoder_embeds": 21}
    assert steps([rows], **budget) == [5, *[3] * 25] or steps([rows], **budget)
    whole: dict[str, Any] = {"encoder_whole_layers": (5,), "encoder_attention_cost": 2 / rows}
    found = list(itertools.accumulate(steps([rows], **budget | whole)))
    assert [end for end in found if 36 <= end < 42] == [36, 37, 38, 39, 40, 41]  # three times a part without attention each


@pytest.mark.parametrize("seed", range(30))
def test_only_single_parts_exceed_the_budget(seed: int) -> None:
    chance = random.Random(seed)
    rows = [chance.randrange(1, chance.choice((40, 400))) for _ in range(chance.randrange(1, 5))]
    whole = {layer for layer in range(12) if chance.random() < 0.4}
    fields: dict[str, Any] = {"encoder_whole_layers": tuple(whole), "encoder_attention_cost": chance.random()}
    cost = EncoderCost(small_config(Path("/"), **SHAPE | fields))
    parts = cost.parts_of(rows)
    assert len(parts) == 13 * -(-sum(rows) // SLICE_ROWS)
    of_layers = [sum(rows) + (cost._attention * sum(row * row for row in rows) if layer in whole else 0) for layer in range(12)]
    assert sum(parts) == pytest.approx(sum(of_layers) + sum(rows) / 4)
    ends = list(itertools.accumulate(steps(rows, **fields)))
    assert ends[-1] == len(parts)
    for first, end in itertools.pairwise([0, *ends]):
        assert end - first == 1 or sum(parts[first:end]) <= cost.max_cost
