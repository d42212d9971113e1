"""KV caches with given values, in the layout of each op table, and the values that such a cache holds."""

from __future__ import annotations

import numpy as np

from ops import _cpu
from ops.cpu.table import KV_TYPES
from ops.modules import KvCache, LayerCache
from ops.table import OpTable
from tests.ops.cuda import pages

DTYPES = KV_TYPES


def make_cache(k: OpTable, keys: np.ndarray, values: np.ndarray, num_kv_heads: int, block_size: int, dtype: str) -> KvCache:
    """Return a cache of one layer with `keys` and `values`, float32 [num_slots, num_kv_heads * head_dim]."""
    if k.name == "reference":
        import paddle

        assert dtype == "float32", "the reference keeps float32 alone"
        return KvCache(block_size, [LayerCache(paddle.to_tensor(keys), paddle.to_tensor(values), block_size)])
    if k.name == "cuda":
        import paddle

        blocks = [pages.blocks_of(part, num_kv_heads, block_size, dtype) for part in (keys, values)]
        return KvCache(block_size, [LayerCache(*map(paddle.to_tensor, blocks), block_size, dtype)])
    head_dim = keys.shape[1] // num_kv_heads
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    block_bytes = block_size * num_kv_heads * (head_dim * element + (4 if dtype == "int8" else 0))
    kept = [np.zeros((len(keys) // block_size, block_bytes), np.uint8) for _ in range(2)]
    _store(keys, values, kept, num_kv_heads, block_size, dtype)
    return KvCache(block_size, [LayerCache(kept[0], kept[1], block_size, dtype)])


def _store(
    keys: np.ndarray, values: np.ndarray, kept: list[np.ndarray], num_kv_heads: int, block_size: int, dtype: str
) -> None:
    """Store them with the op that does so, with an identity rotation and no queries."""
    num_slots, head_dim = len(keys), keys.shape[1] // num_kv_heads
    rows = np.ascontiguousarray(np.concatenate([keys, values], axis=1), np.float32)
    positions, slots = np.zeros(num_slots, np.int32), np.arange(num_slots, dtype=np.int32)
    cosines, sines = np.ones(head_dim, np.float32), np.zeros(head_dim, np.float32)
    partners = np.arange(head_dim, dtype=np.int32)
    arrays = [rows, *kept, positions, slots, cosines, sines, partners]
    first, *others = (array.ctypes.data for array in arrays)
    places = (rows.shape[1], 0, 0, keys.shape[1])
    shape = (0.0, False, 0, num_kv_heads, head_dim, KV_TYPES.index(dtype), block_size, 0, kept[0].shape[1])
    _cpu.run(_cpu.rotate_and_store(0, first, *places, *others, 0, 0, 0, *shape, 0, num_slots))


def contents(k: OpTable, cache: LayerCache, num_kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values, float32 [num_slots, num_kv_heads * head_dim]."""
    if k.name == "reference":
        return cache.keys.numpy(), cache.values.numpy()
    if k.name == "cuda":
        parts = (cache.keys.numpy(), cache.values.numpy())
        keys, values = (pages.numbers_of(part, num_kv_heads, head_dim, cache.block_size, cache.dtype) for part in parts)
        return keys, values
    return (
        _read_keys(cache.keys, num_kv_heads, head_dim, cache.block_size, cache.dtype),
        _read_values(cache.values, num_kv_heads, head_dim, cache.block_size, cache.dtype),
    )


def _read_keys(kept: np.ndarray, heads: int, dim: int, block_size: int, dtype: str) -> np.ndarray:
    numbers, scales = _numbers(kept, heads, dim, block_size, dtype)
    slots = numbers.shape[2] // dim
    if dtype == "bfloat16":
        numbers = numbers.reshape(len(kept), heads, -1, dim // 2, slots, 2).transpose(0, 1, 2, 4, 3, 5)
    else:
        numbers = numbers.reshape(len(kept), heads, -1, dim, slots).swapaxes(3, 4)
    return _rows(numbers.reshape(len(kept), heads, block_size, dim) * scales)


def _read_values(kept: np.ndarray, heads: int, dim: int, block_size: int, dtype: str) -> np.ndarray:
    numbers, scales = _numbers(kept, heads, dim, block_size, dtype)
    if dtype == "bfloat16" and block_size > 1:
        numbers = numbers.reshape(len(kept), heads, -1, dim, 2).swapaxes(3, 4)
    return _rows(numbers.reshape(len(kept), heads, block_size, dim) * scales)


def _numbers(kept: np.ndarray, heads: int, dim: int, block_size: int, dtype: str) -> tuple[np.ndarray, np.ndarray | float]:
    """Return [blocks, heads * chunks, numbers of a chunk], and the scales [blocks, heads, block_size, 1]."""
    slots = min(block_size, _cpu.KEY_PANEL)
    chunks = kept.reshape(len(kept), heads * (block_size // slots), -1)
    if dtype == "float32":
        return chunks.view(np.float32), 1.0
    if dtype == "bfloat16":
        return (chunks.view(np.uint16).astype(np.uint32) << 16).view(np.float32), 1.0
    scales = np.ascontiguousarray(chunks[:, :, slots * dim :]).view(np.float32)
    return chunks[:, :, : slots * dim].view(np.int8).astype(np.float32), scales.reshape(len(kept), heads, block_size, 1)


def _rows(numbers: np.ndarray) -> np.ndarray:
    """Return [blocks, heads, block_size, dim] as [slots, heads * dim]."""
    blocks, heads, block_size, dim = numbers.shape
    return np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(blocks * block_size, heads * dim)
