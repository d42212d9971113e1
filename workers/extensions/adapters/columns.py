"""Adapters in a step: the arena part of each linear, and the adapter of each row's sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.messages import SlotStart
from workers.engine.batch_slots import BatchSlots
from workers.engine.extension import Extension
from workers.engine.inputs import RowsOfSlots, StepInputs
from workers.extensions.adapters.arena import AdapterArena

if TYPE_CHECKING:
    from workers.models.loading import LoadedModel

NO_ADAPTER = -1


class AdapterColumns(Extension):
    """The adapters of `arena`, for rows of any sequence."""

    def __init__(self, arena: AdapterArena) -> None:
        self.arena = arena
        self.adapter_slots = np.zeros(0, np.int32)

    def on_load(self, loaded: LoadedModel, version: int) -> None:
        self.arena.bind([*loaded.linears, *loaded.routers], loaded.experts)
        for slot in np.unique(self.adapter_slots):  # of sequences that are there
            self.arena.use(int(slot))

    def on_unload(self) -> None:
        self.arena.leave_card()

    def add_to(self, inputs: StepInputs) -> None:
        for rows in (inputs, inputs.kept):
            rows.add("adapter_slots", rows.max_rows)

    def bind(self, slots: BatchSlots) -> None:
        """Register the adapter of each of `slots`."""
        self.adapter_slots = slots.register("adapter_slots", NO_ADAPTER)
        slots.add_part(self)

    def start(self, message: SlotStart) -> None:
        self.adapter_slots[message.slot] = message.adapter_slot
        self.arena.use(message.adapter_slot)

    def set(self, inputs: StepInputs, rows: RowsOfSlots) -> None:
        self.arena.use_experts()
        of_rows = self.adapter_slots[rows.slots].repeat(rows.counts)
        inputs.set("adapter_slots", of_rows, NO_ADAPTER)
        inputs.kept.set("adapter_slots", of_rows[rows.kept_row_ids], NO_ADAPTER)
