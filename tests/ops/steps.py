"""Hand-made steps for tests of the ops: inputs and a cache with any sequences."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ops.modules import KvCache
from ops.table import ROW_TILE, OpTable
from tests.ops.caches import make_cache
from workers.devices.paddle import PaddleDevice
from workers.engine.batch_slots import BatchSlots
from workers.engine.inputs import InputSizes, StepInputs

MAX_SEQS = 24
MAX_TOKENS = 256
MAX_LENGTH = 320


@lru_cache(maxsize=4)  # drawing takes longer than the ops of a test
def _drawn(num_blocks: int, block_size: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    shape = ((num_blocks + 1) * block_size, width)
    keys, values = generator.standard_normal(shape, np.float32), generator.standard_normal(shape, np.float32)
    for array in keys, values:
        array[:block_size] = 0
        array.flags.writeable = False
    return keys, values


class HandMadeStep:
    """A step with `sequences`, (slot, start, count) each. Every slot has blocks of its own, scattered over the cache."""

    def __init__(
        self,
        sequences: list[tuple[int, int, int]],
        *,
        block_size: int = 16,
        row_tile: int = ROW_TILE,
        has_adapters: bool = False,
    ) -> None:
        self.device = PaddleDevice("cpu")
        sizes = InputSizes(MAX_SEQS, MAX_TOKENS, MAX_LENGTH, block_size, row_tile)
        self.inputs = StepInputs(self.device, sizes)
        if has_adapters:
            for rows in (self.inputs, self.inputs.kept):
                rows.add("adapter_slots", rows.max_rows)
        blocks_per_slot = self.inputs.host_block_tables.shape[2]
        self.num_blocks = MAX_SEQS * blocks_per_slot
        order = np.random.default_rng(5).permutation(self.num_blocks) + 1
        self.inputs.host_block_tables[0, :MAX_SEQS] = order.reshape(MAX_SEQS, blocks_per_slot)
        self.block_size = block_size
        self.prompts = BatchSlots(self.inputs.host_block_tables, MAX_LENGTH, 50)
        self.token_ids = np.random.default_rng(6).integers(0, 50, (MAX_SEQS, MAX_LENGTH)).astype(np.int32)
        self.set(sequences)

    def set(self, sequences: list[tuple[int, int, int]], kept_counts: list[int] | None = None) -> None:
        """Set the inputs. `kept_counts`: the last rows of each sequence that are kept; by default all."""
        slots, starts, counts = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
        kept = counts if kept_counts is None else np.array(kept_counts, np.int32)
        self.inputs.set_rows(slots, starts, counts, kept, self.token_ids, self.prompts)

    def bound(self, slot: int, bounds: np.ndarray) -> None:
        """Bound the keys that the first tokens of a slot see from now on: `bounds` int32 [tokens, 2], the first and the
        last."""
        self.prompts.mask_bounds[slot], self.prompts.bounds_ends[slot] = bounds, len(bounds)

    def cache(self, k: OpTable, num_kv_heads: int, head_dim: int, dtype: str = "float32", seed: int = 7) -> KvCache:
        """Return one layer of random keys and values; the dummy block is zero."""
        keys, values = _drawn(self.num_blocks, self.block_size, num_kv_heads * head_dim, seed)
        return make_cache(k, keys, values, num_kv_heads, self.block_size, dtype)

    def numbers(self, num_kv_heads: int, head_dim: int, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of that layer in its type's precision: float32 [num_slots, num_kv_heads * head_dim]."""
        keys, values = _drawn(self.num_blocks, self.block_size, num_kv_heads * head_dim, seed)
        return keys.copy(), values.copy()

    def slots_of(self, slot: int, num_keys: int) -> np.ndarray:
        """Return the cache slots of a sequence's first keys."""
        positions = np.arange(num_keys)
        blocks = self.inputs.host_block_tables[0, slot, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
