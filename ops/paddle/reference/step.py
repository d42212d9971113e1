"""Metadata of a step for attention: block tables, masks and positions on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import paddle

from ops.modules import KvCache
from ops.paddle.metadata import derive, quotient
from ops.step_layout import InPlace
from ops.table import AttentionMetadata, Inputs


@dataclass(slots=True)
class AttentionStep:
    """Inputs of attention in a step, the same for every layer: T tiles of Q queries, S splits of KEY_SPLIT keys."""

    inputs: AttentionMetadata
    block_size: int
    query_positions: paddle.Tensor  # int32 [T, Q, 1]
    # by block table and window: int32 [T, S * KEY_SPLIT]; dummy slot 0 if no query of the tile sees a key
    key_slots: dict[tuple[int, int], paddle.Tensor] = field(default_factory=dict)
    # by these, the number of KV heads of the cache and the rank's range: int32 [T, S * heads * KEY_SPLIT]
    head_slots: dict[tuple[int, int, int, range], paddle.Tensor] = field(default_factory=dict)
    # by window, whether it is a chunk, and whether it is two-sided: float32 [T, Q, S, 1, 1, KEY_SPLIT], 0 or -inf
    masks: dict[tuple[int, bool, bool, bool], paddle.Tensor] = field(default_factory=dict)


def begin(inputs: Inputs, cache: KvCache) -> AttentionStep:
    """slot = block_table[seq, pos // block_size] * block_size + pos % block_size, on the device."""
    size = cache.block_size
    if inputs.is_made_on_device:
        derive(cast(InPlace, inputs), size)  # with the slots of the first block table
    positions = inputs.positions
    for number in range(inputs.is_made_on_device, len(inputs.block_tables)):
        tables = inputs.block_tables[number]
        blocks = paddle.gather(tables.flatten(), inputs.row_slots * tables.shape[1] + quotient(positions, size))
        paddle.assign(blocks * size + positions % size, output=inputs.slot_mappings[number])
    return attention_step(inputs, size)


def attention_step(inputs: AttentionMetadata, size: int) -> AttentionStep:
    queries = paddle.gather(inputs.positions, inputs.tile_row_ids[: inputs.num_tiles * inputs.tile_rows])
    return AttentionStep(inputs, size, queries.reshape([inputs.num_tiles, inputs.tile_rows, 1]))
