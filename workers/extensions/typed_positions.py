"""Position column of models with learned positions (BERT), which are separate for the first and second text of a prompt."""

from __future__ import annotations

import numpy as np

from engine.messages import SlotStart
from workers.engine.batch_slots import BatchSlots
from workers.engine.inputs import RowsOfSlots, StepInputs


class TypedPositionColumns:
    """Position rows of a model with `num_positions` for each type of text."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self.second_starts = np.zeros(0, np.int32)

    def add_to(self, inputs: StepInputs) -> None:
        inputs.add("position_rows", inputs.max_rows)

    def bind(self, slots: BatchSlots) -> None:
        """Register where the second texts of `slots` begin: the end of the prompt if there is none."""
        self.second_starts = slots.register("second_starts", 0)
        slots.add_part(self)

    def start(self, message: SlotStart) -> None:
        self.second_starts[message.slot] = message.second_start or message.num_prompt_tokens

    def set(self, inputs: StepInputs, rows: RowsOfSlots) -> None:
        positions = rows.positions
        is_second = positions >= self.second_starts[rows.slots].repeat(rows.counts)
        inputs.set("position_rows", positions + self._num_positions * is_second)
