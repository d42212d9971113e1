"""Layout of the recurrent states of a model's sequences in memory.

Used by the launcher (size of the arena, memory) and by the workers (places in it). A state is what all recurrent layers keep of
a sequence's first tokens. It fills a slot of the state arena, a memfd of the supervisor beside the KV arena, which outlives
workers, schedulers and caches. The scheduler assigns slots (`engine/scheduler/states.py`). All numbers are float32.

    arena   slot 0 | slot 1 | ... | slot num_states        slot_bytes each; slot 0 is all zeros: the state before position 0
    slot    layer 0 | layer 1 | ...                        recurrent layers in their order
    layer   window       [kernel - 1, channels]            last inputs of the convolution, the newest last
            matrix       [heads, key_dim, value_dim]       none if the layer is a convolution alone
            window log   [num_logged, channels]            inputs of rows behind the state: of the convolution,
            matrix log   [num_logged, log_width]           and of the recurrence

Each part begins at a multiple of 64 bytes. Rows behind a state are those that may be rejected or computed again; the next step
replays the ones that were accepted.
"""

from __future__ import annotations

import math

import msgspec

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.recurrent_layer import RecurrentLayer

ALIGNMENT = 64
_VALUE_BYTES = 4


class StatePlaces(msgspec.Struct, frozen=True):
    """First byte in a slot of each part of a layer's state."""

    window: int
    matrix: int
    window_log: int
    matrix_log: int


class StateSpec(msgspec.Struct, frozen=True):
    """Layout of a slot. `num_logged`: rows behind a state that may be replayed."""

    layers: tuple[RecurrentLayer | None, ...]  # of the model; None: not recurrent
    num_logged: int

    @staticmethod
    def of(model: ModelConfig, num_logged: int) -> StateSpec | None:
        """Return the layout of a model's states; None: it has no recurrent layers."""
        return StateSpec(model.recurrent_layers, num_logged) if any(model.recurrent_layers) else None

    @property
    def places(self) -> tuple[StatePlaces | None, ...]:
        """Return the places of each layer's state; None: it has none."""
        places: list[StatePlaces | None] = []
        first = 0
        for layer in self.layers:
            if layer is None:
                places.append(None)
                continue
            starts = []
            for num_bytes in _part_bytes(layer, self.num_logged):
                starts.append(first)
                first += num_bytes
            places.append(StatePlaces(*starts))
        return tuple(places)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, also if nothing is kept: convolutions of one position have no window."""
        return max(ALIGNMENT, sum(sum(_part_bytes(layer, self.num_logged)) for layer in self.layers if layer is not None))

    def arena_bytes(self, num_states: int) -> int:
        """Return the bytes of `num_states` slots and of slot 0."""
        return (num_states + 1) * self.slot_bytes


def _part_bytes(layer: RecurrentLayer, num_logged: int) -> tuple[int, int, int, int]:
    """Return the bytes of window, matrix, window log and matrix log, each with its padding."""
    counts = (
        (layer.kernel - 1) * layer.channels,
        math.prod(layer.matrix) if layer.matrix else 0,
        num_logged * layer.channels,
        num_logged * layer.log_width,
    )
    window, matrix, window_log, matrix_log = (-(-count * _VALUE_BYTES // ALIGNMENT) * ALIGNMENT for count in counts)
    return window, matrix, window_log, matrix_log
