"""Inputs of a step on a device with its own memory: one small copy, from which the device computes everything else in place.

Replaces `StepInputs` in the runners of such devices, with the same values. The copy is int32 [num_sent]
(`ops/step_layout.py`), sent up to the used length:

    number of places | slots | starts | counts | kept | flags (a column of max_num_seqs each) | place, value | ...

preceded by the inputs of MTP layers, if any (`ops/layer_rows.py`).

Places are in the slots' memory on the device: their tokens, block tables and lengths, and their sampling parameters. A sequence
is written there when it takes its slot. Later, each step brings the tokens that its rows read, unless the device sampled or
drafted them itself, and the growth of the block tables. Masks and media of prompts, which few steps have, are copied
separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ops.modules import Tensor
from ops.step_layout import MAX_DIVIDED, NUM_SETTINGS, SETTINGS, Sizes
from ops.table import KEY_SPLIT, NUM_LOGIT_ROWS, NUM_ROWS, ROW_TILE
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.inputs import StepInputs
from workers.engine.row_inputs import AttentionMetadata, Room


class DeviceInputs(StepInputs):
    """`StepInputs` computed by the device. The host has no copy."""

    is_made_on_device = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._uploaded_row_ids = self.logit_row_ids

    def _make_derived(self, device: Device, room: Room) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        most, max_model_len, num_blocks = 1 + self._sizes.num_drafts, self._sizes.max_model_len, self._sizes.num_blocks
        self.sizes = sizes = Sizes(
            num_slots=room.max_num_seqs,
            num_positions=max_model_len + 2 * most,
            num_blocks=num_blocks,
            max_rows=room.max_rows,
            max_tiles=room.max_tiles,
            # of decoding rows: tokens, at most as many blocks, a length
            max_written=room.max_num_seqs * ((1 + room.num_tables) * most + 1),
            num_tables=room.num_tables,
        )
        assert sizes.num_values < 1 << 31, f"{sizes.num_values} places in the slots' memory, limit 2^31"
        assert sizes.num_positions <= MAX_DIVIDED, f"{sizes.num_positions} positions, limit {MAX_DIVIDED}"
        self._pads_tiles = self._sizes.num_drafts > 0 or room.pads_prompts
        self._max_splits = -(-max_model_len // KEY_SPLIT)
        self._device = device
        self.reserve(np.zeros(0, np.int32))
        self.slots = device.tensor(np.zeros(sizes.num_values, np.int32))
        self.numbers = device.tensor(np.arange(max(sizes.max_tiles * ROW_TILE, sizes.max_written), dtype=np.int32))
        self.derived = device.tensor(np.zeros(sum(sizes.of_rows.values()) + sum(sizes.of_kept.values()), np.int32))
        self._num_put = np.zeros(room.max_num_seqs, np.int32)  # tokens of each slot written when it was taken
        self._written: list[tuple[np.ndarray, np.ndarray]] = []  # places and values, for the next step
        of_rows: dict[str, Tensor] = {}
        of_kept: dict[str, Tensor] = {}
        begin = 0
        for found, counts in ((of_rows, sizes.of_rows), (of_kept, sizes.of_kept)):
            for name, count in counts.items():
                found[name] = self._part(device, self.derived, begin, count)
                begin += count
        shape = [sizes.num_slots + 1, num_blocks]
        places = map(sizes.table_at, range(sizes.num_tables))
        self.block_tables = [self._part(device, self.slots, place, math.prod(shape)).reshape(shape) for place in places]
        return of_rows, of_kept

    def reserve(self, resting: np.ndarray) -> Tensor:
        """Reserve int32 [n] (`beside`) in front of the copy, for values that are set per step and otherwise are `resting`;
        return their tensor on the device."""
        count, num_values = len(resting), len(resting) + self.sizes.num_sent
        self.beside, self._resting = resting.copy(), resting
        self._staging = [self._device.staging(num_values) for _ in range(2)]  # one may be in flight while the other is filled
        self._sent = self._device.tensor(np.zeros(num_values, np.int32))
        self.sent = self._part(self._device, self._sent, count, self.sizes.num_sent)
        return self._part(self._device, self._sent, 0, count) if count else None

    @staticmethod
    def _part(device: Device, tensor: Tensor, begin: int, count: int) -> Tensor:
        """Return a part of a tensor that shares its memory."""
        part = tensor[begin : begin + count]
        assert device.address(part) == device.address(tensor) + 4 * begin, "this device copies slices"
        return part

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that are read or computed, and `logit_row_ids`, which are used when the rows are not
        consecutive."""
        yield from ((name, tensor) for name, tensor in super().tensors() if name != "logit_row_ids")
        yield from (("sent", self.sent), ("slots", self.slots), ("numbers", self.numbers), ("derived", self.derived))
        yield "logit_row_ids", self._uploaded_row_ids

    # --------------------------------------------------------------------------------------------------------- slots

    def start(self, slots: BatchSlots, slot: int) -> None:
        sizes, count = self.sizes, int(slots.num_tokens[slot])
        self._num_put[slot] = count
        in_table = np.arange(slot * sizes.num_blocks, (slot + 1) * sizes.num_blocks)
        blocks = np.concatenate([in_table + sizes.table_at(number) for number in range(sizes.num_tables)])
        tokens = np.arange(count) + slot * sizes.num_positions
        self._device.put(self.slots, tokens, slots.token_ids[slot, :count])
        settings = sizes.settings_at + slot * NUM_SETTINGS + np.arange(NUM_SETTINGS)
        places = np.concatenate([blocks, [sizes.lengths_at + slot], settings])
        sampling = slots.array("sampling")
        words = np.concatenate([np.atleast_1d(sampling[name][slot]).view(np.int32) for name in SETTINGS])
        self._device.put(self.slots, places, np.concatenate([self.host_block_tables[:, slot].ravel(), [count], words]))

    def grow(self, tables: np.ndarray, slots: np.ndarray, indexes: np.ndarray) -> None:
        if len(slots):
            firsts = np.array([self.sizes.table_at(number) for number in range(self.sizes.num_tables)])
            places = firsts[tables] + slots * self.sizes.num_blocks + indexes
            self._written.append((places, self.host_block_tables[tables, slots, indexes]))

    # ---------------------------------------------------------------------------------------------------------- rows

    def set_rows(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        kept_counts: np.ndarray,
        slot_token_ids: np.ndarray,
        prompts: BatchSlots | None = None,
        flags: np.ndarray | None = None,
    ) -> None:
        """Set rows like `StepInputs.set_rows`. `flags`: FOLLOWING for rows that begin at their slots' last tokens, which are at
        `starts` or before; DRAWN."""
        assert (slots[1:] > slots[:-1]).all(), f"rows of slots {slots.tolist()} are not in slot order"
        ends = starts + counts
        for rows, of_rows in ((self, counts), (self.kept, kept_counts)):
            rows._count(int(of_rows.sum()), of_rows)
            rows._count_tiles(ends, of_rows)
        self._write_tokens(slots, starts, counts, slot_token_ids)
        if prompts is not None:
            self._written.append((self.sizes.lengths_at + slots, prompts.num_tokens[slots]))
        self._send(slots, starts, counts, kept_counts, flags if flags is not None else np.zeros_like(slots))
        row_ids = np.zeros(0, np.int32)
        if prompts is not None and (self._columns or (prompts.bounds_ends[slots] > starts).any()):
            kept_ends = np.cumsum(kept_counts)
            row_ids = np.arange(self.kept.num_tokens) + (np.cumsum(counts) - kept_ends).repeat(kept_counts)
        self._set_prompts(prompts, slots, starts, counts, row_ids)

    def _write_tokens(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slot_token_ids: np.ndarray) -> None:
        """Write the tokens that these rows read, unless they were written before or are the device's own (-1)."""
        firsts = np.maximum(starts, self._num_put[slots])
        numbers = np.maximum(starts + counts - firsts, 0)
        rows = slots.repeat(numbers)
        positions = np.arange(len(rows)) + (firsts - np.cumsum(numbers) + numbers).repeat(numbers)
        token_ids = slot_token_ids[rows, positions]
        is_known = token_ids >= 0
        self._written.append(((rows * self.sizes.num_positions + positions)[is_known], token_ids[is_known]))

    def _send(self, *columns: np.ndarray) -> None:
        sizes = self.sizes
        places, values = (np.concatenate(each) for each in zip(*self._written, strict=True))
        self._written.clear()
        if len(places) > sizes.max_written:  # blocks of prompts, in an extra copy
            self._device.put(self.slots, places, values)
            places, values = places[:0], values[:0]
        self._staging.reverse()
        staging, count = self._staging[0], len(self.beside)
        self._device.settle(staging)  # the host never waits for steps that sample nothing
        staging[:count], self.beside[:] = self.beside, self._resting
        sent = staging[count:]
        sent[0] = len(places)
        rows = sent[1 : 1 + len(columns) * sizes.num_slots].reshape(len(columns), sizes.num_slots)
        rows[:] = 0
        rows[0] = sizes.num_slots
        for row, column in zip(rows, columns, strict=True):
            row[: len(column)] = column
        begin = 1 + rows.size
        end = begin + 2 * len(places)
        sent[begin:end:2], sent[begin + 1 : end : 2] = places, values
        self._device.send(staging, self._sent, count + end)

    def pad(self, size: int) -> None:
        """Set the numbers of rows, tiles and keys of every step padded to `size`."""
        for rows in (self, self.kept):
            assert rows.num_tokens <= size <= self.max_rows, f"{rows.num_tokens} rows to be padded to {size}"
            self._fix(rows, self.padded(size))

    def _fix(self, rows: AttentionMetadata, num_rows: int) -> None:
        rows.num_rows = rows.num_tiles = num_rows
        rows.host_counts[NUM_ROWS] = num_rows
        rows.tile_rows, rows.num_key_splits = 1, self._max_splits
        if self._pads_tiles:
            rows.tile_rows, rows.num_tiles = (
                ROW_TILE,
                min(self.sizes.max_tiles, num_rows // ROW_TILE + self.sizes.num_slots + 1),
            )

    def set_logit_rows(self, row_ids: np.ndarray) -> None:
        """Set rows only if they are not consecutive; those of steps that sample are there already."""
        count = len(row_ids)
        first = int(row_ids[0]) if count else 0
        if first + self.padded(count) <= self.kept.num_rows and (row_ids == np.arange(first, first + count)).all():
            self.num_logit_rows = self.host_counts[NUM_LOGIT_ROWS] = count
            self.logit_row_ids = self.numbers[first : first + self.max_logit_rows]
            self.has_first_logit_rows = first == 0
            return
        self.logit_row_ids, self.has_first_logit_rows = self._uploaded_row_ids, False
        super().set_logit_rows(row_ids)
