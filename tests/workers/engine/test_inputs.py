"""A step's metadata: correct, refreshed in place, never moved."""

from __future__ import annotations

import numpy as np
import pytest

from ops.modules import KvCache
from ops.paddle.reference import TABLE
from ops.table import ROW_TILE
from workers.devices.paddle import PaddleDevice
from workers.engine.inputs import InputSizes, StepInputs

ENCODER_LENGTHS = [100, 0, 0, 0, 120, 140, 0]
DECODER_LENGTHS = [0, 5, 0, 25, 64, 0, 128]
BLOCK_TABLE = np.arange(1, 57).reshape(7, 8)
BLOCK_SIZE = 64

STEPS = {
    "reference": (DECODER_LENGTHS, [100, 1, 0, 1, 120, 140, 1]),
    "drafts": (DECODER_LENGTHS, [100, 2, 0, 1, 120, 140, 3]),
    "empty": ([0] * 7, [0] * 7),
    "all decode": ([5, 63, 64, 65, 127, 128, 500], [1] * 7),
    "all prefill": ([0] * 7, [1, 16, 17, 33, 64, 65, 3]),
    "block boundaries": ([63, 64, 128, 0, 0, 0, 448], [2, 64, 1, 128, 0, 0, 64]),
    "one tile": ([0] * 7, [16, 0, 0, 0, 0, 0, 0]),
}


@pytest.fixture
def inputs() -> StepInputs:
    made = StepInputs(PaddleDevice("cpu"), InputSizes(7, 512, 512, BLOCK_SIZE))
    made.host_block_tables[0, :7] = BLOCK_TABLE
    return made


@pytest.mark.parametrize(("num_drafts", "num_rows"), [(0, 64), (3, 64), (15, 112), (99, 256)])
def test_logit_rows_cover_all_draft_tokens(num_drafts: int, num_rows: int) -> None:
    """A few sequences have a fixed number of rows; with many, memory limits it."""
    made = StepInputs(PaddleDevice("cpu"), InputSizes(7, 512, 512, BLOCK_SIZE, num_drafts=num_drafts))
    assert (made.max_logit_rows, len(made.logit_row_ids.numpy())) == (num_rows, num_rows)


def set_step(inputs: StepInputs, name: str) -> tuple[np.ndarray, np.ndarray]:
    starts, counts = (np.array(column, np.int32) for column in STEPS[name])
    token_ids = np.arange(7 * 512).reshape(7, 512)
    inputs.set_rows(np.arange(7, dtype=np.int32), starts, counts, counts, token_ids)
    if inputs.num_rows:
        TABLE.begin(inputs, KvCache(BLOCK_SIZE))
    return starts, counts


@pytest.mark.parametrize("name", STEPS)
def test_metadata_describes_each_row(inputs: StepInputs, name: str) -> None:
    """Each row's sequence, position, token and slot; offsets and lengths; nothing of an earlier step."""
    set_step(inputs, "reference")
    starts, counts = set_step(inputs, name)
    rows = [(slot, starts[slot] + index) for slot in range(7) for index in range(counts[slot])]
    num_rows = len(rows)
    padding = inputs.num_rows - num_rows
    assert inputs.num_tokens == num_rows
    assert inputs.num_rows % ROW_TILE == 0
    assert padding == (-num_rows % ROW_TILE if num_rows else ROW_TILE)
    values = {key: tensor.numpy() for key, tensor in inputs.tensors()}
    assert list(zip(values["row_slots"][:num_rows], values["positions"][:num_rows], strict=True)) == rows
    assert (values["row_slots"][num_rows:] == 7).all()
    assert (values["positions"][num_rows:] == 0).all()
    assert values["token_ids"][:num_rows].tolist() == [slot * 512 + position for slot, position in rows]
    assert (values["token_ids"][num_rows:] == 0).all()
    assert values["sequence_offsets"].tolist() == [0, *np.cumsum(counts)]
    assert values["sequence_starts"].tolist() == starts.tolist()
    assert values["context_lengths"].tolist() == (starts + counts).tolist()
    if num_rows:
        slots = [BLOCK_TABLE[slot, position // 64] * 64 + position % 64 for slot, position in rows]
        assert values["slot_mapping"][:num_rows].tolist() == slots
        assert (values["slot_mapping"][num_rows:] == 0).all()


def test_inputs_equal_the_reference_vector(inputs: StepInputs) -> None:
    """Prompts of a step start at 0 where nothing is decoded yet, otherwise after the cached part."""
    set_step(inputs, "reference")
    values = {key: tensor.numpy() for key, tensor in inputs.tensors()}
    assert values["sequence_offsets"].tolist() == [0, 100, 101, 101, 102, 222, 362, 363]
    assert values["slot_mapping"][[0, 99, 100, 101, 102, 221, 222, 361, 362]].tolist() == [
        1 * 64, 2 * 64 + 35, 9 * 64 + 5, 25 * 64 + 25, 34 * 64, 35 * 64 + 55, 41 * 64, 43 * 64 + 11, 51 * 64,
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in STEPS if name != "empty"])
def test_tiles_cover_each_row_once(inputs: StepInputs, name: str) -> None:
    """Each row is exactly one query of a tile of its own sequence, and the padded rows are of the dummy slot."""
    set_step(inputs, name)
    values = {key: tensor.numpy() for key, tensor in inputs.tensors()}
    tiles, size = inputs.num_tiles, inputs.tile_rows
    assert tiles >= 2
    assert size == (1 if name == "all decode" else ROW_TILE)
    row_ids = values["tile_row_ids"][: tiles * size]
    queries = values["row_queries"][: inputs.num_rows]
    np.testing.assert_array_equal(row_ids[queries], np.arange(inputs.num_rows))
    assert len(set(queries.tolist())) == inputs.num_rows
    np.testing.assert_array_equal(values["tile_slots"][queries // size], values["row_slots"][: inputs.num_rows])
    contexts = np.append(values["context_lengths"], 1)[values["row_slots"][: inputs.num_rows]]
    np.testing.assert_array_equal(values["tile_contexts"][queries // size], contexts)
    assert inputs.num_key_splits * 64 >= contexts.max() > (inputs.num_key_splits - 1) * 64
    assert (values["tile_slots"][tiles:] == 7).all()


@pytest.mark.parametrize("name", STEPS)
def test_kept_rows_are_the_last_of_each_sequence(inputs: StepInputs, name: str) -> None:
    """The last rows of each sequence, as many as it has and are wanted, with the inputs of attention."""
    starts, counts = (np.array(column, np.int32) for column in STEPS[name])
    kept_counts = np.minimum(counts, [100, 1, 1, 1, 0, 5, 2]).astype(np.int32)
    slots, token_ids = np.arange(7, dtype=np.int32), np.zeros((7, 512), np.int32)
    inputs.set_rows(slots, starts, counts, counts, token_ids)  # nothing of it stays
    inputs.set_rows(slots, starts, counts, kept_counts, token_ids)
    kept = inputs.kept
    ends = np.cumsum(counts)
    rows = [end - count + index for end, count in zip(ends, kept_counts, strict=True) for index in range(count)]
    values = {key: tensor.numpy() for key, tensor in kept.tensors()}
    assert values["row_ids"][: len(rows)].tolist() == rows
    assert not values["row_ids"][len(rows) :].any()
    np.testing.assert_array_equal(values["positions"][: len(rows)], inputs.positions.numpy()[rows])
    assert values["sequence_offsets"].tolist() == [0, *np.cumsum(kept_counts)]
    assert values["sequence_starts"].tolist() == (starts + counts - kept_counts).tolist()
    assert kept.num_rows == max(ROW_TILE, -(-len(rows) // ROW_TILE) * ROW_TILE)
    assert kept.num_tiles >= 2
    tiles, size = kept.num_tiles, kept.tile_rows
    np.testing.assert_array_equal(
        values["tile_row_ids"][: tiles * size][values["row_queries"][: kept.num_rows]], np.arange(kept.num_rows)
    )


def test_addresses_of_inputs_never_change(inputs: StepInputs) -> None:
    before = {name: (tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in inputs.tensors()}
    for name in [*STEPS, *reversed(STEPS)]:
        set_step(inputs, name)
        inputs.set_logit_rows(np.array([3, 1]))
        assert {name: (tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in inputs.tensors()} == before


def test_unused_logit_rows_are_zeroed(inputs: StepInputs) -> None:
    inputs.set_logit_rows(np.arange(40))
    inputs.set_logit_rows(np.array([5, 2]))
    assert inputs.num_logit_rows == 2
    assert inputs.logit_row_ids.numpy()[:3].tolist() == [5, 2, 0]
    assert not inputs.logit_row_ids.numpy()[2:].any()
