"""KV arena of a rank: two tensors per layer over memory that outlives the worker.

Made once by the runner, over the memfd that the supervisor holds (or any buffer, in tests).

    [layers of a page][keys, values][num_pages + 1, bytes of a block], page 0 is the dummy block
    [num_pages + 1, block_size] marks, a byte each, if the model has MTP layers

Layers with the same index in a page share these tensors and have different block tables (`engine/checkpoint/kv_cache_spec.py`).
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
    sizes, num_pages = (spec.key_bytes, spec.value_bytes), spec.num_pages(num_blocks) + 1
    tensors = []
    for layer in np.frombuffer(arena, np.uint8, num_pages * _layer_bytes(spec)).reshape(spec.layers_per_page, -1):
        parts = np.split(layer, [num_pages * spec.key_bytes])
        views = [part.reshape(num_pages, size) for part, size in zip(parts, sizes, strict=True)]
        keys, values = (device.arena(view_of(view, spec.block_size)) for view in views)
        tensors.append((keys, values))
    layers = []
    for place in spec.places:
        keys, values = tensors[place.index]
        layers.append(LayerCache(keys, values, spec.block_size, spec.dtype, place.table, place.first_head, place.num_heads))
    return KvCache(spec.block_size, layers)


def map_marks(arena: memoryview, spec: KVCacheSpec, num_blocks: int) -> np.ndarray:
    """Return for each position of each page whether MTP layers have its keys and values: bool [num_pages + 1, block_size]. Only
    pages in the first block table of a slot have marks."""
    num_pages = spec.num_pages(num_blocks) + 1
    marks = np.frombuffer(arena, np.bool_, num_pages * spec.block_size, num_pages * _layer_bytes(spec))
    return marks.reshape(-1, spec.block_size)


def _layer_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page without its marks."""
    return spec.layers_per_page * (spec.key_bytes + spec.value_bytes)
