"""The KV arena as a worker sees it: per layer two tensors over memory that outlives the worker.

Made once by the runner, over the memfd that the supervisor holds (or any buffer, in tests).

    [layers, 2 (keys, values), num_blocks + 1, bytes of a block], block 0 is the dummy block

What a block holds (block_size positions of num_kv_heads heads) is the op table's business.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from ops.modules import KvCache, LayerCache
from workers.devices.device import Device

DUMMY_BLOCK = 0


def map_kv_cache(arena: memoryview, spec: KVCacheSpec, num_blocks: int, device: Device) -> KvCache:
    """The tensors over `arena`, which may be larger than needed. Its contents stay: blocks that an earlier worker filled are
    valid."""
    needed = spec.arena_bytes(num_blocks)
    assert arena.nbytes >= needed, f"the arena has {arena.nbytes} bytes, {num_blocks} blocks need {needed}"
    memory = np.frombuffer(arena, np.uint8, needed).reshape(spec.num_layers, 2, num_blocks + 1, -1)
    views = [[device.tensor(device.ops.cache_view(part, spec.block_size)) for part in layer] for layer in memory]
    return KvCache(spec.block_size, [LayerCache(keys, values, spec.block_size, spec.dtype) for keys, values in views])
