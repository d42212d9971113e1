"""Rows of latent attention for tests: the input of a row depends only on its slot and position. The cache is full of NaN, as
other sequences may leave it, except for the dummy block.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import paddle

from engine.checkpoint.kv_cache_spec import KVCacheSpec, place_layers
from engine.checkpoint.rope_config import RopeConfig
from ops.modules import KvCache, LatentShape, LayerCache, Norm, Rotary
from ops.table import OpTable
from tests.ops.cuda import pages
from tests.ops.packing import pack
from tests.ops.steps import MAX_LENGTH, HandMadeStep
from workers.weights.rotary import rotary_tables

EPSILON = 1e-3
NUM_SLOTS, NUM_POSITIONS = 10, 232  # that rows are made for


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@lru_cache(2)
def _inputs(shape: LatentShape) -> dict[str, np.ndarray]:
    widths = {
        "queries": shape.queries_width,
        "absorbed": shape.num_heads * shape.latent_dim,
        "compressed": shape.latent_dim + shape.rotary_dim,
    }
    return {name: random(NUM_SLOTS, NUM_POSITIONS, width, seed=width) for name, width in widths.items()}


class LatentRows:
    """Steps of latent attention; `run` returns the first sequence's rows of every step."""

    def __init__(
        self,
        k: OpTable,
        shape: LatentShape,
        block_size: int = 16,
        kv_dtype: str = "float32",
        is_interleaved: bool = True,
    ) -> None:
        self.k, self.shape, self.block_size, self.kv_dtype = k, shape, block_size, kv_dtype
        self.is_interleaved = is_interleaved
        self.norm = Norm("n", shape.latent_dim, EPSILON)
        pack(self.k, self.norm, weight=self.norm_weight)
        self.rotary = Rotary(shape.rotary_dim)
        named = zip(("cosines", "sines", "partners"), self.rotary_tables, strict=True)
        pack(self.k, self.rotary, **dict(named))
        self.inputs = _inputs(shape)
        self.bounds: dict[int, np.ndarray] = {}  # by slot

    @property
    def norm_weight(self) -> np.ndarray:
        return random(self.shape.latent_dim, seed=9)

    @property
    def rotary_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dim = self.shape.rotary_dim
        return rotary_tables(RopeConfig("default", 100.0, dim, self.is_interleaved, MAX_LENGTH), dim, MAX_LENGTH)

    def cache(self, step: HandMadeStep) -> KvCache:
        dims = self.shape.rotary_dim, self.shape.latent_dim
        spec = KVCacheSpec(*place_layers([0]), 1, *dims, self.block_size, self.kv_dtype)
        views = []
        for size in (spec.key_bytes, spec.value_bytes):
            memory = np.full((step.num_blocks + 1, size), 255, np.uint8)
            memory[0] = 0
            view = self.k.cache_view(memory, self.block_size)
            views.append(step.device.tensor(view) if self.k.name in ("reference", "cuda") else view)
        return KvCache(self.block_size, [LayerCache(*views, self.block_size, self.kv_dtype)])

    def run(self, steps: list[list[tuple[int, int, int]]]) -> np.ndarray:
        return self.run_in_cache(steps)[0]

    def run_in_cache(self, steps: list[list[tuple[int, int, int]]]) -> tuple[np.ndarray, LayerCache, HandMadeStep]:
        step = HandMadeStep(steps[0], block_size=self.block_size, row_tile=self.k.row_tile)
        cache = self.cache(step)
        for slot, bounds in self.bounds.items():
            step.bound(slot, bounds)
        outputs = []
        for sequences in steps:
            step.set(sequences)
            begun = self.k.begin(step.inputs, cache)
            rows = {name: self._rows(name, sequences, step.inputs.num_rows) for name in self.inputs}
            angles, layer = self.k.rotary_angles(step.inputs, self.rotary), cache.layers[0]
            queries = self.k.store_latent(
                step.inputs, rows["queries"], rows["compressed"], angles, self.norm, self.shape, layer
            )
            found = self.k.latent_attention(begun, rows["absorbed"], queries, self.shape, layer)
            outputs.append(found.numpy()[: sequences[0][2]].copy())
        return np.concatenate(outputs), cache.layers[0], step

    def _rows(self, name: str, sequences: list[tuple[int, int, int]], num_rows: int) -> paddle.Tensor:
        inputs = self.inputs[name]
        rows = np.concatenate([inputs[slot, start : start + count] for slot, start, count in sequences])
        padded = np.zeros((num_rows, inputs.shape[-1]), np.float32)
        padded[: len(rows)] = rows
        return paddle.to_tensor(padded)


def contents(cache: LayerCache, dim: int, *, is_key: bool) -> np.ndarray:
    """Return latents or rotated keys, float32 [slots, dim]."""
    kept = cache.keys if is_key else cache.values
    if not isinstance(kept, np.ndarray):
        numbers = np.asarray(kept.numpy())
        return numbers if numbers.dtype == np.float32 else pages.numbers_of(numbers, 1, dim, cache.block_size, cache.dtype)
    rows = kept.reshape(len(kept) * cache.block_size, -1)
    if cache.dtype == "float32":
        return rows.view(np.float32)
    if cache.dtype == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows[:, :dim].view(np.int8) * np.ascontiguousarray(rows[:, dim:]).view(np.float32)
