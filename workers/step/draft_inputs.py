"""What layers that draft read on the device: rows of sequences, each with the hidden state that comes before its token.

Owned by the drafter (`workers/drafts/mtp.py`), over the block tables of the step's inputs. Tables with padded rows have all
whole numbers in one tensor, which is sent in one copy (`flush`); native tapes read the host's arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.modules import Tensor
from ops.table import NUM_ROWS
from workers.devices.device import Device
from workers.step.inputs import Room, RowInputs

_APART = ("hidden", "slot_mapping")  # no whole numbers; the device's alone


class DraftInputs(RowInputs):
    """At most `max_rows` rows, with hidden states of `hidden_size` numbers."""

    hidden: Tensor
    _packed: Tensor = None
    _is_changed = False  # what is packed, since it was sent

    def __init__(self, device: Device, room: Room, block_tables: Tensor, hidden_size: int, max_key_splits: int) -> None:
        """`max_key_splits`: of a sequence of any length."""
        super().__init__(device, room)
        self.block_tables = block_tables
        self._max_key_splits = max_key_splits
        self._add("hidden", room.max_rows, hidden_size, dtype=np.float32)
        self.host_hidden = self._host["hidden"]
        if self._row_tile > 1:
            self._pack(device)

    def _pack(self, device: Device) -> None:
        names = [name for name in self._host if name not in _APART]
        ends = np.cumsum([self._host[name].size for name in names]).tolist()
        rows = np.zeros(ends[-1], np.int32)
        packed = device.tensor(np.zeros_like(rows))
        begins = [0, *ends[:-1]]
        parts = [packed[begin:end] for begin, end in zip(begins, ends, strict=True)]
        if [device.address(part) for part in parts] != [device.address(packed) + rows.itemsize * begin for begin in begins]:
            return  # of one that copies where a part is asked for each tensor is sent
        self._rows, self._packed = rows, packed
        self._staging = [device.staging(len(rows)) for _ in range(2)]  # one may be on its way while the other is filled
        for name, part, begin, end in zip(names, parts, begins, ends, strict=True):
            self._host[name] = rows[begin:end]
            setattr(self, name, part)

    def _upload(self, name: str) -> None:
        if self._packed is None or name in _APART:
            super()._upload(name)
        else:
            self._is_changed = True

    def flush(self) -> None:
        """To be called before anything reads what was set."""
        if not self._is_changed:
            return
        self._is_changed = False
        self._staging.reverse()
        staging = self._staging[0]
        self._device.settle(staging)
        staging[:] = self._rows
        self._device.send(staging, self._packed, len(self._rows))

    def host_addresses(self) -> dict[str, int]:
        """Where the host has what a tape reads."""
        names = ("token_ids", "row_slots", "positions", "sequence_slots", "sequence_offsets", "sequence_starts")
        arrays = {name: self._host[name] for name in (*names, "first_keys", "last_keys", "logit_row_ids", "hidden")}
        return {name: array.ctypes.data for name, array in (arrays | {"counts": self.host_counts}).items()}

    def set_rows(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slot_token_ids: np.ndarray, first_keys: np.ndarray
    ) -> None:
        """Sequence i has the positions [starts[i], starts[i] + counts[i]) of `slots[i]` and sees keys from first_keys[i] on.
        What lies before each row is in `host_hidden` already."""
        self._set_tokens(slots, starts, counts, slot_token_ids)
        self._set_bounds((first_keys.repeat(counts), self._host["positions"][: self.num_tokens]))
        self._upload("hidden")

    def set_logit_rows(self, row_ids: np.ndarray) -> None:
        super().set_logit_rows(row_ids)
        self.has_first_logit_rows = bool((row_ids == np.arange(len(row_ids))).all())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        yield "block_tables", self.block_tables

    def pad(self, size: int) -> None:
        """Of devices: have the numbers of rows, tiles and keys of every step that is padded to `size` rows, each a sequence of
        its own."""
        if self._row_tile == 1:
            super().pad(size)
            return
        assert self.num_tokens <= size <= self.max_rows, f"{self.num_tokens} rows to be padded to {size}"
        self._fix(self.padded(size), self._max_key_splits)

    def pad_entries(self, size: int) -> None:
        """Likewise, of rows whose entries are written, and that see nothing."""
        assert self.num_tokens <= size <= self.max_rows, f"{self.num_tokens} rows to be padded to {size}"
        self._fix(self.padded(size), 1)

    def _fix(self, num_rows: int, num_key_splits: int) -> None:
        self.num_rows = self.num_tiles = self.host_counts[NUM_ROWS] = num_rows
        self.tile_rows, self.num_key_splits = 1, num_key_splits
        row_ids = np.arange(num_rows)
        for name in ("tile_row_ids", "row_queries"):
            if (self._host[name][:num_rows] != row_ids).any():
                self._set(name, row_ids)
