"""Self-test of a model on a device: a prompt as a whole, and in chunks beside others, with a separate cache. Used by
`op_choice.py` and `row_check.py` before a rank serves."""

from __future__ import annotations

import numpy as np

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from ops.table import OpTable
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.inputs import InputSizes, RowColumns, StepInputs
from workers.engine.kv_cache import map_kv_cache
from workers.extensions.media.media_columns import MediaColumns
from workers.extensions.media.prompt_media import MediaSlots
from workers.extensions.typed_positions import TypedPositionColumns
from workers.models import Model

_BLOCK_SIZE, _NUM_SLOTS, _LENGTH = 16, 3, 100
Sequences = list[tuple[int, int, int]]  # slot, first position, number of positions


class SelfTest:
    """Inputs and cache for a model of `config` on `table`."""

    def __init__(
        self, device: Device, table: OpTable, config: ModelConfig, kv_dtype: str, max_model_len: int = _LENGTH
    ) -> None:
        self._table = table
        self.length = length = min(_LENGTH, max_model_len)
        spec = KVCacheSpec.of(config, _BLOCK_SIZE, kv_dtype)
        sizes = InputSizes(_NUM_SLOTS, 2 * length, length, _BLOCK_SIZE, table.row_tile, num_tables=spec.num_tables)
        media = MediaColumns(config) if config.vision else None
        positions = TypedPositionColumns(config.max_position_embeddings) if config.position_tables else None
        columns: list[RowColumns] = [each for each in (media, positions) if each is not None]
        self._inputs = inputs = StepInputs(device, sizes, columns)
        tables = inputs.host_block_tables[:, :_NUM_SLOTS]
        tables[:] = np.arange(tables.size, 0, -1).reshape(tables.shape)
        num_blocks = tables[0].size
        self._cache = map_kv_cache(memoryview(bytearray(spec.arena_bytes(num_blocks))), spec, num_blocks, device, table)
        self._slots = slots = BatchSlots(inputs.host_block_tables, length, config.vocab_size)
        inputs.start(slots, 0)  # which copies the tables to a device
        if media is not None:
            media.bind(MediaSlots(slots), slots.token_ids)
        if positions is not None:
            positions.bind(slots)
            positions.second_starts[:] = length  # each prompt is one text
        self._is_cut = not config.is_bidirectional  # else a prompt is computed in one step
        slots.token_ids[:, :length] = np.random.default_rng(0).integers(0, config.vocab_size, (len(slots.token_ids), length))

    def hidden_of(self, model: Model) -> tuple[np.ndarray, np.ndarray]:
        """Return hidden states after the last layer, float32 [length, hidden]: of the whole prompt; and of its chunks, or
        beside others, without reading values on the host."""
        length = self.length
        first, end, others = length * 3 // 8, length - 2, length // 5
        cut: list[Sequences] = [[(1, 0, first)], [(0, 0, others), (1, first, end - first), (2, 0, others // 2)]]
        cut += [[(0, others, 1), (1, end, 1), (2, others // 2, 1)], [(1, end + 1, 1)]]
        if not self._is_cut:
            cut = [[(0, 0, others), (1, 0, length), (2, 0, others // 2)]]
        return self._run(model, self._table, [[(1, 0, length)]]), self._run(model, self._table.sync_free(), cut)

    def _run(self, model: Model, table: OpTable, steps: list[Sequences]) -> np.ndarray:
        found = []
        for step in steps:
            of_slots, starts, counts = (np.array(column, np.int32) for column in zip(*step, strict=True))
            self._inputs.set_rows(of_slots, starts, counts, counts, self._slots.token_ids, self._slots)
            rows = model.forward(table, self._inputs, self._cache).numpy()[: counts.sum()]
            found.append(np.split(rows, np.cumsum(counts)[:-1])[of_slots.tolist().index(1)])
        return np.concatenate(found)
