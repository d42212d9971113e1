"""The native table: the ops of `ops/table.py` on float32 kernels (`native/`).

`TABLE` runs each op when it is called; `make_table(Recording())` records them. Tensors are `Array`s; Paddle tensors on the CPU
and numpy arrays are taken as well, in place. A step needs no padded rows (`row_tile` 1) and no attention tiles: attention reads
the sequences of the step and their block tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ops import _cpu
from ops.cpu.array import Array, Rows, rows_of
from ops.cpu.executors import Executor, Immediate
from ops.cpu.packing import WEIGHT_KINDS, PackedWeight, layout, pack
from ops.cpu.work import Work, attention_work, gather_work, linear_work, rotation_work
from ops.modules import AttentionShape, Embedding, HeadNorm, KvCache, LayerCache, Linear, Norm, Rotary, Tensor
from ops.table import KEY_SPLIT, NUM_ROWS, NUM_SEQUENCES, AttentionMetadata, Inputs, OpTable

KV_TYPES = ("float32", "bfloat16", "int8")  # as `KvType` in native/kernels.h
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")  # as `Activation` in native/kernels.h
assert KEY_SPLIT == _cpu.KEY_SPLIT, "ops/table.py and native/kernels.h split keys differently"


def cache_view(memory: np.ndarray, block_size: int) -> np.ndarray:
    """As it is: the layout is native/kernels.h's."""
    return memory


def clear_block(cache: KvCache, block: int) -> None:
    for layer in cache.layers:
        layer.keys[block] = 0
        layer.values[block] = 0


class CpuOps:
    """The ops, on one executor. A step's metadata are the inputs themselves: nothing is derived from them but the slots."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def _rows(self, inputs: AttentionMetadata) -> Rows:
        return self._executor.rows(inputs.host_counts, NUM_ROWS, inputs.max_rows)

    def begin(self, inputs: Inputs, cache: KvCache) -> Inputs:
        self._executor.emit(
            _cpu.map_slots,
            inputs.slot_mapping,
            inputs.positions,
            inputs.row_slots,
            inputs.block_tables,
            inputs.block_tables.shape[1],
            cache.block_size,
            rows=self._rows(inputs),
            work=lambda: Work(4 * 4 * inputs.num_rows),
        )
        return inputs

    def embedding(self, inputs: Inputs, module: Embedding) -> Array:
        return self._gather(module.weight, inputs.token_ids, module.num_rows, module.width, self._rows(inputs))

    def take_rows(self, x: Tensor, row_ids: Tensor) -> Array:
        return self._take_rows(x, row_ids, rows_of(row_ids))

    def keep_rows(self, inputs: Inputs, queries: Tensor, x: Tensor) -> tuple[AttentionMetadata, Array, Array]:
        kept = inputs.kept
        rows = self._rows(kept)
        return kept, self._take_rows(queries, kept.row_ids, rows), self._take_rows(x, kept.row_ids, rows)

    def _take_rows(self, x: Tensor, row_ids: Tensor, rows: Rows) -> Array:
        table = PackedWeight(WEIGHT_KINDS.index("float32"), x, is_in_panels=False)
        return self._gather(table, row_ids, rows_of(x).limit, x.shape[1], rows)

    def _gather(self, table: PackedWeight, row_ids: Tensor, num_rows: int, width: int, rows: Rows) -> Array:
        y = self._executor.allocate(rows, width)
        self._executor.emit(
            _cpu.embedding,
            y,
            table.values,
            table.scales,
            table.multipliers,
            table.offsets,
            row_ids,
            num_rows,
            width,
            table.group_size,
            table.kind,
            table.is_in_panels,
            rows=rows,
            work=lambda: gather_work(y),
        )
        return y

    def linear(self, x: Tensor, module: Linear) -> Array:
        y = self._executor.allocate(rows_of(x), module.width)
        weight: PackedWeight = module.weight
        self._executor.emit(
            _cpu.linear,
            y,
            x,
            weight.kind,
            weight.values,
            weight.scales,
            weight.multipliers,
            weight.offsets,
            module.bias,
            module.num_inputs,
            module.width,
            weight.group_size,
            rows=y.rows,
            name=module.name,
            work=lambda: linear_work(y, x, module),
        )
        return y

    def rms_norm(self, x: Tensor, module: Norm) -> Array:
        y = self._executor.allocate(rows_of(x), module.width)
        self._executor.emit(_cpu.rms_norm, y, None, x, None, module.weight, module.epsilon, module.width, rows=y.rows)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, module: Norm) -> tuple[Array, Array]:
        rows = rows_of(x)
        y, total = self._executor.allocate(rows, module.width), self._executor.allocate(rows, module.width)
        self._executor.emit(_cpu.rms_norm, y, total, x, residual, module.weight, module.epsilon, module.width, rows=rows)
        return y, total

    def rotary_angles(self, inputs: Inputs, module: Rotary) -> Rotary:
        """Nothing to compute: angles are read where they lie, by position."""
        return module

    def rotate_and_store(
        self, inputs: Inputs, qkv: Tensor, rotary: Rotary, norm: HeadNorm | None, shape: AttentionShape, cache: LayerCache
    ) -> Array:
        queries = self._executor.allocate(rows_of(qkv), shape.queries_width)
        query_weight, key_weight = (None, None) if norm is None else norm.weight
        self._executor.emit(
            _cpu.rotate_and_store,
            queries,
            qkv,
            cache.keys,
            cache.values,
            inputs.positions,
            inputs.slot_mapping,
            rotary.cosines,
            rotary.sines,
            rotary.partners,
            query_weight,
            key_weight,
            0.0 if norm is None else norm.epsilon,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            rows=queries.rows,
            work=lambda: rotation_work(queries, qkv, cache),
        )
        return queries

    def attention(self, inputs: AttentionMetadata, queries: Tensor, shape: AttentionShape, cache: LayerCache) -> Array:
        group = shape.num_heads // shape.num_kv_heads
        assert group <= _cpu.MAX_GROUP, f"{group} queries share a key, the native ops take {_cpu.MAX_GROUP}"
        y = self._executor.allocate(rows_of(queries), shape.queries_width)
        self._executor.emit(
            _cpu.attention,
            y,
            queries,
            cache.keys,
            cache.values,
            inputs.sequence_slots,
            inputs.sequence_offsets,
            inputs.sequence_starts,
            inputs.block_tables,
            inputs.block_tables.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.sliding_window,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            rows=self._executor.rows(inputs.host_counts, NUM_SEQUENCES, inputs.max_rows),
            work=lambda: attention_work(y, queries, inputs, shape, cache),
        )
        return y

    def activate_and_multiply(self, x: Tensor, activation: str) -> Array:
        width = x.shape[1] // 2
        y = self._executor.allocate(rows_of(x), width)
        self._executor.emit(_cpu.activate_and_multiply, y, x, ACTIVATIONS.index(activation), width, rows=y.rows)
        return y


def make_table(executor: Executor) -> OpTable:
    """The table whose ops go to `executor`."""
    ops: Any = CpuOps(executor)
    return OpTable(
        name="native",
        max_head_dim=_cpu.MAX_HEAD_DIM,
        row_tile=1,
        pack=pack,
        layout=layout,
        cache_view=cache_view,
        clear_block=clear_block,
        begin=ops.begin,
        embedding=ops.embedding,
        linear=ops.linear,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        rotary_angles=ops.rotary_angles,
        rotate_and_store=ops.rotate_and_store,
        attention=ops.attention,
        keep_rows=ops.keep_rows,
        activate_and_multiply=ops.activate_and_multiply,
        take_rows=ops.take_rows,
    )


TABLE = make_table(Immediate())
