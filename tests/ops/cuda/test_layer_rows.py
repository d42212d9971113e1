"""Rows of draft layers on an emulated card equal those of Paddle's ops bit for bit, over steps that share states."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ops.cuda import table as cuda
from ops.cuda.array import CudaArray, HostMemory, array_on
from ops.layer_rows import NO_ENTRIES, OF_DRAFTS, LayerSizes
from ops.modules import KvCache, Tensor
from ops.paddle.reference import TABLE
from ops.table import OpTable
from tests.ops.tables import emulated_card
from workers.devices.paddle import PaddleDevice
from workers.engine.batch_slots import BatchSlots
from workers.engine.device_inputs import DeviceInputs
from workers.engine.inputs import InputSizes
from workers.sampling.slot_sampling import SlotSampling

NUM_SLOTS, GROUP, WIDTH, MAX_DRAFTED = 5, 3, 20, 16
FIELDS = ("token_ids", "positions", "row_slots", "first_keys", "last_keys", "tile_contexts", "tile_row_ids", "host_counts")
SIZES = LayerSizes(MAX_DRAFTED, GROUP, 64, WIDTH)


class Rank:
    """Inputs on a device with the memory of draft layers, by the ops of a table."""

    def __init__(self, table: OpTable) -> None:
        self._table = table
        self._inputs = DeviceInputs(
            PaddleDevice("cpu"), InputSizes(NUM_SLOTS, 64, 256, 16, TABLE.row_tile, num_drafts=GROUP - 1)
        )
        self._slots = BatchSlots(self._inputs.host_block_tables, 256, 1000, GROUP - 1)
        SlotSampling(self._slots)
        draft_tokens, entries = np.zeros((OF_DRAFTS, MAX_DRAFTED), np.int32), np.zeros((2, NUM_SLOTS), np.int32)
        draft_tokens[0], draft_tokens[4] = NUM_SLOTS, NUM_SLOTS * GROUP
        entries[0], entries[1] = NO_ENTRIES, NUM_SLOTS * GROUP
        columns = self._inputs.reserve(np.concatenate([draft_tokens.ravel(), entries.ravel()]))
        assert table.layer_memory is not None
        self._memory = table.layer_memory(self._inputs, columns, SIZES)

    def start(self, slot: int, token_ids: np.ndarray) -> None:
        self._slots.reset(slot)
        self._slots.token_ids[slot, : len(token_ids)] = token_ids
        self._slots.num_tokens[slot] = self._slots.num_prompt_tokens[slot] = len(token_ids)
        self._slots.block_tables[slot, 0, :16] = np.arange(16) + 16 * slot + 1
        self._inputs.start(self._slots, slot)

    def step(
        self, rows: np.ndarray, drafts: np.ndarray, entries: np.ndarray, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """Run a step of `rows` (slots, starts, counts); `drafts`: columns of those with draft tokens; `entries`: of all. Return
        all that was computed."""
        inputs, memory = self._inputs, self._memory
        slots, starts, counts = rows
        inputs.beside[: OF_DRAFTS * MAX_DRAFTED].reshape(OF_DRAFTS, MAX_DRAFTED)[:, : drafts.shape[1]] = drafts
        inputs.beside[OF_DRAFTS * MAX_DRAFTED :].reshape(2, NUM_SLOTS)[:, : len(slots)] = entries
        inputs.set_rows(slots, starts, counts, counts, self._slots.token_ids, self._slots)
        num_rows, found = inputs.padded(drafts.shape[1]), []
        for number in range(int(drafts[2].max(initial=0))):
            made, hidden = memory.rows_of_draft(number, num_rows, 2)
            found += [*fields_of(made), values_of(hidden)]
            logits = generator.integers(0, 9, (num_rows, 300)).astype(np.float32)  # the largest is there several times
            logits[0, [7, 3]] = np.nan
            for begin in range(0, num_rows, 4):
                part = slice(begin, min(begin + 4, num_rows))
                memory.put_draft(number, part, self._own(logits[part]))
            memory.put_fed(self._own(generator.standard_normal((num_rows, WIDTH)).astype(np.float32)))
        found.append(memory.draft_tokens(num_rows, GROUP - 1).numpy())
        self._table.begin(inputs, KvCache(16))
        row_ids = self._own(np.arange(inputs.kept.num_rows, dtype=np.int32)[::-1].copy())
        found += [
            memory.with_read_tokens(drawn, row_ids).numpy() for drawn in (None, self._own(np.ones((3, len(row_ids)), np.int32)))
        ]
        hidden = self._own(generator.standard_normal((inputs.kept.num_rows, WIDTH)).astype(np.float32))
        memory.keep_hidden(hidden)
        made, before = memory.rows_of_entries(hidden)
        return [
            *found,
            *fields_of(made),
            values_of(before)[: inputs.kept.num_tokens],
            values_of(memory.states),
            values_of(memory.kept),
        ]

    def _own(self, values: np.ndarray) -> Tensor:
        return paddle.to_tensor(values) if self._table is TABLE else array_on(HostMemory(), values)


def values_of(tensor: Tensor) -> np.ndarray:
    values: np.ndarray = tensor.numpy()
    return values[: len(values) - 1] if len(values) == (NUM_SLOTS + 1) * GROUP else values  # the last state is never read


def fields_of(inputs: Any) -> list[np.ndarray]:
    found = [getattr(inputs, name) for name in FIELDS]
    return [each if isinstance(each, np.ndarray) else each.numpy() for each in found]


def test_rows_equal_those_of_paddle() -> None:
    ranks, makers = [Rank(TABLE), Rank(cuda.make_table(emulated_card()))], [np.random.default_rng(5) for _ in range(2)]
    generator = np.random.default_rng(1)
    lengths = generator.integers(20, 90, NUM_SLOTS)
    for slot, length in enumerate(lengths):
        token_ids = generator.integers(0, 1000, length)
        for rank in ranks:
            rank.start(slot, token_ids)
    for number in range(6):
        slots = np.sort(generator.permutation(NUM_SLOTS)[: 1 + number % NUM_SLOTS]).astype(np.int32)
        counts = generator.integers(1, 9 if number == 0 else 4, len(slots)).astype(np.int32)
        starts = (lengths[slots] - counts).astype(np.int32)
        states = (slots * GROUP + generator.integers(0, GROUP, len(slots))).astype(np.int32)
        firsts = np.where(generator.random(len(slots)) < 0.3, NO_ENTRIES, starts + generator.integers(0, 2, len(slots)))
        of_drafts = np.sort(generator.integers(1, GROUP, len(slots)))[::-1]
        drafts = np.stack([slots, lengths[slots] - 1, of_drafts, starts // 2, states]).astype(np.int32)
        rows, entries = np.stack([slots, starts, counts]), np.stack([firsts, states]).astype(np.int32)
        expected, found = (rank.step(rows, drafts, entries, maker) for rank, maker in zip(ranks, makers, strict=True))
        assert len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, other)


def test_hidden_states_have_the_type_of_activations() -> None:
    memory = cuda.make_table(emulated_card(), dtype="bfloat16").layer_memory
    assert memory is not None
    inputs = DeviceInputs(PaddleDevice("cpu"), InputSizes(NUM_SLOTS, 64, 256, 16, TABLE.row_tile, num_drafts=GROUP - 1))
    made = memory(inputs, inputs.reserve(np.zeros(OF_DRAFTS * MAX_DRAFTED + 2 * NUM_SLOTS, np.int32)), SIZES)
    fed = array_on(HostMemory(), np.arange(2 * WIDTH, dtype=np.uint16).reshape(2, WIDTH), "bfloat16")
    made.put_fed(fed)
    kept: CudaArray = made.fed[:2]
    np.testing.assert_array_equal(kept.numpy(), fed.numpy())
