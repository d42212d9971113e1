"""The KV arena as a worker sees it: per layer two tensors over memory that outlives the worker.

Made once by the runner, over the memfd that the supervisor holds (or any buffer, in tests).

    float32 [layers, 2 (keys, values), num_blocks + 1, block_size, num_kv_heads, head_dim], block 0 is the dummy block
"""

from __future__ import annotations

import numpy as np

from engine.model_config import ModelConfig
from ops.modules import KvCache, LayerCache
from workers.device import Device


def kv_cache_bytes(config: ModelConfig, num_blocks: int, block_size: int) -> int:
    """Bytes of an arena with `num_blocks` blocks besides the dummy block."""
    return (num_blocks + 1) * config.kv_bytes_per_block(block_size)


def map_kv_cache(arena: memoryview, config: ModelConfig, num_blocks: int, block_size: int, device: Device) -> KvCache:
    """The tensors over `arena`, which may be larger than needed. Its contents stay: blocks that an earlier worker filled are
    valid."""
    num_slots, width = (num_blocks + 1) * block_size, config.num_kv_heads * config.head_dim
    needed = kv_cache_bytes(config, num_blocks, block_size)
    assert arena.nbytes >= needed, f"the arena has {arena.nbytes} bytes, {num_blocks} blocks need {needed}"
    values = np.frombuffer(arena, np.float32, needed // 4).reshape(config.num_layers, 2, num_slots, width)
    layers = [LayerCache(device.tensor(layer[0]), device.tensor(layer[1])) for layer in values]
    return KvCache(block_size, layers)
