"""Media in a step: the encoder part runs first, then every feature that a row reads is checked.

The ranks of a group share what is missing, so that none runs a step that another does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.messages import EncoderCall
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.extension import Extension
from workers.engine.rows import StepRows
from workers.engine.step_run import StepRun
from workers.extensions.media.encoder import Encoder
from workers.extensions.media.features import Features, together
from workers.extensions.media.prompt_media import MediaSlots
from workers.rank_group.collectives import Collectives

if TYPE_CHECKING:
    from workers.models.loading import LoadedModel


class Media(Extension):
    """Media of a rank. `features`: None if the model serves text only. `plan` and `on_op`: as for `Encoder`."""

    def __init__(
        self,
        features: Features | None,
        slots: BatchSlots,
        device: Device,
        ranks: Collectives,
        plan: str,
        on_op: Callable[[], None],
    ) -> None:
        self.slots = MediaSlots(slots)
        self.encoder: Encoder | None = None  # of the loaded weights
        self.encode_ns = 0  # in all steps so far
        self._features, self._device, self._ranks = features, device, ranks
        self._plan, self._on_op = plan, on_op
        self._version = 0

    def on_load(self, loaded: LoadedModel, version: int) -> None:
        tower, features, ranks = loaded.model.encoder, self._features, self._ranks
        self._version, self.encoder = version, None
        if features is not None and tower is not None:
            own = ranks.place, ranks.count
            self.encoder = Encoder(tower, self._device, features.arena, version, self._plan, *own, self._on_op)

    def on_unload(self) -> None:
        self.encoder = None

    def on_rows(self, run: StepRun) -> None:
        step = run.step
        self.slots.set_unit_rows(
            *(np.frombuffer(each, np.int32) for each in (step.unit_slots, step.unit_indexes, step.unit_rows))
        )
        if self._features is None:
            return
        reading = self._reading(run.rows)
        if step.encoder is None and not reading:
            return
        if step.encoder is not None:
            run.encoded, run.missing = self._encode(step.encoder, self._features)
        run.missing = together(self._ranks, run.missing | self._features.missing(self.slots, reading, self._version))

    def _encode(self, call: EncoderCall, features: Features) -> tuple[list[bytes], dict[bytes, str]]:
        assert self.encoder is not None, f"encoder call {call.call_id} needs an encoder, but the weights have none"
        begin_ns = time.monotonic_ns()
        encoded, missing = features.encode(call, self.encoder)
        self.encode_ns += time.monotonic_ns() - begin_ns
        self._ranks.barrier()  # the other ranks' units are complete too
        return encoded, missing

    def _reading(self, rows: StepRows) -> list[tuple[int, int, int]]:
        """Return slot, begin and end of each row that may read media of its prompt."""
        columns = rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist()
        return [
            (slot, start, start + count)
            for slot, start, count in zip(*columns, strict=True)
            if count and start < self.slots.ends[slot]
        ]
