"""Cost of parts of the encoder's work, and how many of them a step runs. Pure decisions.

Used by `encoder_work.py`. The unit of cost is the time that the matrices of one layer take for one row of features. Attention
is added: in a layer that attends to a whole unit it grows with the square of the unit's rows, and takes as long as the matrices
at about 600 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.config import EngineConfig
from engine.messages.media import SLICE_ROWS

_FIRST_SHARE = 0.25  # part of a layer's matrices that the first pass multiplies by: queries, keys and values


class EncoderCost:
    def __init__(self, config: EngineConfig) -> None:
        self._num_passes = config.encoder_passes
        self.max_cost = config.max_num_batched_encoder_embeds * (config.encoder_passes - 1 + _FIRST_SHARE)
        self._attention = config.encoder_attention_cost
        self._whole = frozenset(config.encoder_whole_layers)

    def parts_of(self, unit_rows: Sequence[int]) -> list[float]:
        """Return the cost of each part of a call with units of these rows: pass by pass, the slices of each. Units sent as
        features cost nothing."""
        slices = list(_slices(unit_rows)) or [(0, 0)]
        return [
            rows * (_FIRST_SHARE if index == 0 else 1.0) + self._attention * pairs * (index - 1 in self._whole)
            for index in range(self._num_passes)
            for rows, pairs in slices
        ]

    def end_after(self, first: int, parts: Sequence[float]) -> int:
        """Return the end of the parts that a step beginning with part `first` runs: as few steps as possible, with about equal
        cost, and at least one part."""
        costs = parts[first:]
        num_steps, cost = 1, 0.0
        for part_cost in costs:
            cost += part_cost
            if cost > self.max_cost and cost > part_cost:
                num_steps, cost = num_steps + 1, part_cost
        share, cost = sum(costs) / num_steps, 0.0
        for part, part_cost in enumerate(costs, first):
            if cost and cost + part_cost > self.max_cost:
                return part
            cost += part_cost
            if cost >= share > 0:
                return part + 1
        return len(parts)


def _slices(unit_rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (rows, pairs of rows within a unit) for each slice of the units' rows."""
    rows = pairs = 0
    for of_unit in unit_rows:
        left = of_unit
        while left:
            count = min(left, SLICE_ROWS - rows)
            rows, pairs, left = rows + count, pairs + count * of_unit, left - count
            if rows == SLICE_ROWS:
                yield rows, pairs
                rows = pairs = 0
    if rows:
        yield rows, pairs
