"""Inputs of MTP layers on the host: rows of sequences, each with the hidden state before its token.

Owned by the drafter (`mtp.py`), over the block tables of the step's inputs, where the host makes the inputs; a device makes
these rows itself (`ops/layer_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.modules import Tensor
from workers.devices.device import Device
from workers.engine.row_inputs import Room, RowInputs


class DraftInputs(RowInputs):
    """At most `max_rows` rows, with hidden states of `hidden_size` numbers."""

    hidden: Tensor

    def __init__(self, device: Device, room: Room, block_tables: Sequence[Tensor], hidden_size: int) -> None:
        super().__init__(device, room)
        self.block_tables = block_tables
        self.add("hidden", room.max_rows, hidden_size, dtype=np.float32)
        self.host_hidden = self._host["hidden"]

    def host_addresses(self) -> dict[str, int]:
        """Return addresses of the host arrays that a tape reads."""
        names = ("token_ids", "row_slots", "positions", "sequence_slots", "sequence_offsets", "sequence_starts")
        arrays = {name: self._host[name] for name in (*names, "first_keys", "last_keys", "logit_row_ids", "hidden")}
        return {name: array.ctypes.data for name, array in (arrays | {"counts": self.host_counts}).items()}

    def set_rows(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slot_token_ids: np.ndarray, first_keys: np.ndarray
    ) -> None:
        """Set rows: sequence i has positions [starts[i], starts[i] + counts[i]) of `slots[i]` and attends to keys from
        first_keys[i] on. The hidden state before each row is already in `host_hidden`."""
        self._set_tokens(slots, starts, counts, slot_token_ids)
        self._set_bounds((first_keys.repeat(counts), self._host["positions"][: self.num_tokens]))
        self._upload("hidden")
