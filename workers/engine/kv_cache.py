"""KV arena of a rank: two tensors per layer over memory that outlives the worker.

Made once by the runner, over the memfd that the supervisor holds (or any buffer, in tests).

    [layers][keys, values][num_blocks + 1, bytes of a block], block 0 is the dummy block
    [num_blocks + 1, block_size] marks, a byte each, if the model has MTP layers

The op table defines the layout of a block (block_size positions of num_kv_heads heads). With latent attention, keys are the
rotated keys and values the latents, of one head.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from ops.modules import KvCache, LayerCache
from ops.table import OpTable
from workers.devices.device import Device

DUMMY_BLOCK = 0


def map_kv_cache(
    arena: memoryview, spec: KVCacheSpec, num_blocks: int, device: Device, table: OpTable | None = None
) -> KvCache:
    """Return the tensors over `arena`, which may be larger than needed, in the layout of the device's ops or of `table`. The
    contents stay: blocks that an earlier worker filled are valid."""
    view_of = (table or device.ops).cache_view
    needed = spec.arena_bytes(num_blocks)
    assert arena.nbytes >= needed, f"the arena has {arena.nbytes} bytes, but {num_blocks} blocks need {needed}"
    sizes = (spec.key_bytes, spec.value_bytes)
    layers = []
    in_layers = (num_blocks + 1) * spec.layer_bytes_per_block
    for layer in np.frombuffer(arena, np.uint8, in_layers).reshape(spec.num_layers, -1):
        parts = np.split(layer, [(num_blocks + 1) * spec.key_bytes])
        views = [part.reshape(num_blocks + 1, size) for part, size in zip(parts, sizes, strict=True)]
        keys, values = (device.arena(view_of(view, spec.block_size)) for view in views)
        layers.append(LayerCache(keys, values, spec.block_size, spec.dtype))
    return KvCache(spec.block_size, layers)


def map_marks(arena: memoryview, spec: KVCacheSpec, num_blocks: int) -> np.ndarray:
    """Return for each position of each block whether MTP layers have its keys and values: bool [num_blocks + 1, block_size]."""
    at = (num_blocks + 1) * spec.layer_bytes_per_block
    return np.frombuffer(arena, np.bool_, (num_blocks + 1) * spec.block_size, at).reshape(-1, spec.block_size)
