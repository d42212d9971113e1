"""The KV arena as a worker sees it: per layer two tensors over memory that outlives the worker.

Made once by the runner, over the memfd that the supervisor holds (or any buffer, in tests).

    [layers, 2 (keys, values), num_blocks + 1, bytes of a block], block 0 is the dummy block

What a block holds (block_size positions of num_kv_heads heads) is the op table's business.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from ops.modules import KvCache, LayerCache
from workers.devices.device import Device

DUMMY_BLOCK = 0


def kv_cache_bytes(config: ModelConfig, num_blocks: int, block_size: int, dtype: str = "float32") -> int:
    """Bytes of an arena with `num_blocks` blocks besides the dummy block."""
    return (num_blocks + 1) * config.kv_bytes_per_block(block_size, dtype)


def map_kv_cache(
    arena: memoryview, config: ModelConfig, num_blocks: int, block_size: int, dtype: str, device: Device
) -> KvCache:
    """The tensors over `arena`, which may be larger than needed. Its contents stay: blocks that an earlier worker filled are
    valid."""
    needed = kv_cache_bytes(config, num_blocks, block_size, dtype)
    assert arena.nbytes >= needed, f"the arena has {arena.nbytes} bytes, {num_blocks} blocks need {needed}"
    memory = np.frombuffer(arena, np.uint8, needed).reshape(config.num_layers, 2, num_blocks + 1, -1)
    views = [[device.tensor(device.ops.cache_view(part, block_size)) for part in layer] for layer in memory]
    return KvCache(block_size, [LayerCache(keys, values, block_size, dtype) for keys, values in views])
