"""The native table: the ops of `ops/table.py` on float32 kernels (`native/`).

`TABLE` runs each op when it is called; `make_table(Recording())` records them. Tensors are `Array`s; Paddle tensors on the CPU
and numpy arrays are accepted too, in place. A step needs no padded rows (`row_tile` 1) and no attention tiles: attention reads
the sequences of the step and their block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ops import _cpu
from ops.cpu.array import Array, Rows, rows_of
from ops.cpu.executors import Executor, Immediate
from ops.cpu.packing import WEIGHT_KINDS, PackedExperts, PackedWeight, layout, pack, panels_of
from ops.cpu.rank_group import ExpertRankGroup
from ops.cpu.recurrence import RecurrentOps
from ops.cpu.work import (
    Work,
    adapt_work,
    attention_work,
    bytes_of,
    experts_work,
    gather_work,
    head_linear_work,
    latent_attention_work,
    linear_work,
    rotation_work,
)
from ops.modules import (
    ACTIVATIONS,
    AdaptedPart,
    AttentionShape,
    ColumnRules,
    Embedding,
    Experts,
    Factor,
    GateClamp,
    HeadLinear,
    HeadNorm,
    KvCache,
    LatentShape,
    LayerCache,
    LayerNorm,
    Linear,
    Norm,
    Rotary,
    Router,
    Tensor,
    TypedPositions,
)
from ops.table import (
    HAS_BOUNDS,
    KEY_SPLIT,
    NUM_ROWS,
    NUM_SEQUENCES,
    NUM_TOKENS,
    AttentionMetadata,
    Inputs,
    OpTable,
    Routing,
    StepInputs,
)

KV_TYPES = ("float32", "bfloat16", "int8")  # as `KvType` in native/kernels.h
_NO_BOUNDS = np.zeros(1, np.int32)
assert KEY_SPLIT == _cpu.KEY_SPLIT, "ops/table.py and native/kernels.h split keys differently"


def cache_view(memory: np.ndarray, block_size: int) -> np.ndarray:
    """Return the memory unchanged: the layout is native/kernels.h's."""
    return memory


def clear_block(cache: KvCache, block: int) -> None:
    for layer in cache.layers:
        layer.keys[block] = 0
        layer.values[block] = 0


def _paging(inputs: AttentionMetadata, cache: LayerCache, *, has_bounds: bool = True) -> tuple[Tensor, ...]:
    """Return the positions, block tables and visible keys of each sequence, as the attention ops take them."""
    tables = inputs.block_tables[cache.table]
    bounds = inputs.host_counts[HAS_BOUNDS:] if has_bounds else _NO_BOUNDS, inputs.first_keys, inputs.last_keys
    return inputs.sequence_slots, inputs.sequence_offsets, inputs.sequence_starts, tables, tables.shape[1], *bounds


@cache
def _zeros(count: int) -> np.ndarray:
    """Return int32 zeros, which are never released: recordings have their address."""
    return np.zeros(count, np.int32)


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of row r are at positions[r]."""

    positions: Tensor
    cosines: Tensor
    sines: Tensor
    partners: Tensor


class CpuOps:
    """The ops, on one executor. The inputs are a step's metadata; only the slots are derived from them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def _rows(self, inputs: AttentionMetadata) -> Rows:
        return self._executor.rows(inputs.host_counts, NUM_ROWS, inputs.max_rows)

    def begin(self, inputs: Inputs, cache: KvCache) -> Inputs:
        for tables, mapping in zip(inputs.block_tables, inputs.slot_mappings, strict=True):
            self._executor.emit(
                _cpu.map_slots,
                mapping,
                inputs.positions,
                inputs.row_slots,
                tables,
                tables.shape[1],
                cache.block_size,
                rows=self._rows(inputs),
                work=lambda: Work(4 * 4 * inputs.num_rows),
            )
        return inputs

    def embedding(self, inputs: Inputs, module: Embedding) -> Array:
        numbers = inputs.position_rows if isinstance(module, TypedPositions) else inputs.token_ids
        return self._look_up(module.weight, numbers, module.num_rows, module.width, self._rows(inputs))

    def take_features(self, inputs: AttentionMetadata, x: Tensor, number: int) -> Tensor:
        """Replace rows of media in `x` by their features, in place."""
        features, width = inputs.features, x.shape[1]
        assert features is not None, "the model has no media features"
        self._executor.emit(
            _cpu.take_features,
            x,
            features,
            inputs.feature_rows,
            len(features),
            features.strides[0],
            number * width,
            width,
            features.dtype == np.uint16,
            number > 0,
            rows=rows_of(x),
            work=lambda: Work(4 * inputs.num_rows),  # rows of media are few
        )
        return x

    def take_rows(self, x: Tensor, row_ids: Tensor) -> Array:
        return self._take_rows(x, row_ids, rows_of(row_ids))

    def keep_rows(self, inputs: StepInputs, *tensors: Tensor) -> tuple[Any, ...]:
        kept = inputs.kept
        rows = self._rows(kept)
        return kept, *(self._take_rows(x, kept.row_ids, rows) for x in tensors)

    def _take_rows(self, x: Tensor, row_ids: Tensor, rows: Rows) -> Array:
        table = PackedWeight(WEIGHT_KINDS.index("float32"), x, is_in_panels=False)
        y = self._look_up(table, row_ids, rows_of(x).limit, x.shape[1], rows)
        if isinstance(x, Array):
            y.columns, y.whole_width = x.columns, x.whole_width
        return y

    def _look_up(self, table: PackedWeight, row_ids: Tensor, num_rows: int, width: int, rows: Rows) -> Array:
        y = self._executor.allocate(rows, width)
        self._executor.emit(
            _cpu.embedding,
            y,
            table.values,
            table.scales,
            table.multipliers,
            table.offsets,
            table.scale_kind,
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
        y.columns = module.columns
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
            weight.scale_kind,
            module.bias,
            module.num_inputs,
            module.width,
            weight.group_size,
            [panel for panels in panels_of(module.columns) for panel in panels],
            rows=y.rows,
            name=module.name,
            work=lambda: linear_work(y, x, module),
        )
        return y

    def adapt(self, inputs: AttentionMetadata, y: Array, x: Tensor, module: Linear) -> Array:
        """Add the adapters' products to `y`, in place."""
        adapters = module.adapters
        assert adapters is not None, f"{module.name} has no adapters"
        self._executor.emit(
            _cpu.adapt,
            y,
            x,
            inputs.adapter_slots,
            adapters.slots,
            adapters.ranks,
            *adapters.slots.shape,
            adapters.ranks.shape[1],
            module.num_inputs,
            module.width,
            [number for part in adapters.parts for number in _adapted_panels(part, module)],
            rows=y.rows,
            name=module.name,
            work=lambda: adapt_work(inputs, y, x, module),
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

    def layer_norm(self, x: Tensor, module: LayerNorm) -> Array:
        return self._layer_norm(x, None, None, module)

    def add_layer_norm(self, x: Tensor, residual: Tensor, module: LayerNorm) -> tuple[Array, Array]:
        total = self._executor.allocate(rows_of(x), module.width)
        return self._layer_norm(x, residual, total, module), total

    def _layer_norm(self, x: Tensor, residual: Tensor | None, total: Array | None, module: LayerNorm) -> Array:
        y = self._executor.allocate(rows_of(x), module.width)
        values = (y, total, x, residual, module.weight, module.bias, module.epsilon, module.width)
        self._executor.emit(_cpu.layer_norm, *values, rows=y.rows)
        return y

    def rotary_angles(self, inputs: Inputs, module: Rotary) -> Angles:
        """Return the angles; they are read in place, by position or by row, without computation."""
        if module.is_by_row:
            return Angles(inputs.row_numbers, inputs.row_cosines, inputs.row_sines, module.partners)
        positions = _zeros(inputs.max_rows) if module.is_constant else inputs.positions
        return Angles(positions, module.cosines, module.sines, module.partners)

    def rotate_and_store(
        self, inputs: Inputs, qkv: Tensor, angles: Angles, norm: HeadNorm | None, shape: AttentionShape, cache: LayerCache
    ) -> Array:
        own, dim = shape.heads, shape.head_dim
        queries = self._queries(rows_of(qkv), shape)
        kv_count = own.kv_count if shape.has_keys else 0
        weights = (None, None, None) if norm is None else norm.weight
        self._executor.emit(
            _cpu.rotate_and_store,
            queries,
            qkv,
            qkv.shape[1],
            own.first * dim,
            shape.queries_width + own.first_kv * dim,
            shape.queries_width + shape.keys_width + own.first_kv * dim,
            cache.keys,
            cache.values,
            angles.positions,
            inputs.slot_mappings[cache.table],
            angles.cosines,
            angles.sines,
            angles.partners,
            *weights,
            0.0 if norm is None else norm.epsilon,
            norm is not None and norm.is_after_rotation,
            own.count,
            kv_count,
            dim,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            cache.first_head + own.first_kv,
            cache.keys.shape[1],
            rows=queries.rows,
            work=lambda: rotation_work(queries, qkv, cache),
        )
        return queries

    def normalize_wide(self, qkv: Tensor, query_norm: Norm, key_norm: Norm, shape: AttentionShape) -> Array:
        y = self._executor.allocate(rows_of(qkv), qkv.shape[1])
        widths = shape.queries_width, shape.keys_width, shape.keys_width
        self._executor.emit(
            _cpu.normalize_wide,
            y,
            qkv,
            query_norm.weight,
            key_norm.weight,
            query_norm.epsilon,
            query_norm.head_dim,
            *widths,
            rows=y.rows,
        )
        return y

    def _heads(self, rows: Rows, first: int, count: int, num_heads: int, width: int) -> Array:
        """Allocate the rank's heads side by side: `count` of `num_heads`, each `width` wide."""
        y = self._executor.allocate(rows, count * width)
        if count < num_heads:
            y.columns, y.whole_width = ((first * width, (first + count) * width),), num_heads * width
        return y

    def _queries(self, rows: Rows, shape: AttentionShape) -> Array:
        return self._heads(rows, shape.heads.first, shape.heads.count, shape.num_heads, shape.head_dim)

    def attention(self, inputs: AttentionMetadata, queries: Tensor, shape: AttentionShape, cache: LayerCache) -> Array:
        group = shape.num_heads // shape.num_kv_heads
        assert group <= _cpu.MAX_GROUP, f"{group} query heads share a key head, the limit of the native ops is {_cpu.MAX_GROUP}"
        y = self._queries(rows_of(queries), shape)
        self._executor.emit(
            _cpu.attention,
            y,
            queries,
            cache.keys,
            cache.values,
            *_paging(inputs, cache, has_bounds=shape.has_bounds),
            shape.heads.count,
            shape.heads.kv_count,
            shape.head_dim,
            shape.sliding_window,
            shape.has_chunks,
            shape.is_two_sided,
            shape.scale,
            shape.softcap,
            None if shape.sinks is None else shape.sinks.weight,
            shape.heads.first,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            cache.first_head + shape.heads.first_kv,
            cache.keys.shape[1],
            rows=self._executor.rows(inputs.host_counts, NUM_SEQUENCES, inputs.max_rows),
            work=lambda: attention_work(y, queries, inputs, shape, cache),
        )
        return y

    def store_latent(
        self,
        inputs: Inputs,
        queries: Tensor,
        compressed: Tensor,
        angles: Angles,
        norm: Norm,
        shape: LatentShape,
        cache: LayerCache,
    ) -> Array:
        own, width = shape.heads, shape.plain_dim + shape.rotary_dim
        y = self._executor.allocate(rows_of(queries), own.count * width)
        self._executor.emit(
            _cpu.store_latent,
            y,
            queries,
            queries.shape[1],
            own.first * width,
            compressed,
            cache.keys,
            cache.values,
            angles.positions,
            inputs.slot_mappings[cache.table],
            angles.cosines,
            angles.sines,
            angles.partners,
            norm.weight,
            norm.epsilon,
            own.count,
            shape.plain_dim,
            shape.rotary_dim,
            shape.latent_dim,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            rows=y.rows,
            work=lambda: rotation_work(y, (queries, compressed), cache),
        )
        return y

    def latent_attention(
        self, inputs: AttentionMetadata, absorbed: Tensor, queries: Tensor, shape: LatentShape, cache: LayerCache
    ) -> Array:
        num_heads = shape.heads.count
        assert num_heads <= _cpu.MAX_GROUP, f"{num_heads} heads share a key, the limit of the native ops is {_cpu.MAX_GROUP}"
        y = self._executor.allocate(rows_of(absorbed), num_heads * shape.latent_dim)
        self._executor.emit(
            _cpu.latent_attention,
            y,
            absorbed,
            queries,
            cache.keys,
            cache.values,
            *_paging(inputs, cache),
            num_heads,
            shape.plain_dim,
            shape.rotary_dim,
            shape.latent_dim,
            shape.scale,
            KV_TYPES.index(cache.dtype),
            cache.block_size,
            rows=self._executor.rows(inputs.host_counts, NUM_SEQUENCES, inputs.max_rows),
            work=lambda: latent_attention_work((y, absorbed, queries), inputs, shape, cache),
        )
        return y

    def head_linear(self, x: Tensor, module: HeadLinear) -> Array:
        heads, num_outputs = module.heads, module.num_outputs
        y = self._heads(rows_of(x), heads.start, len(heads), module.num_heads, num_outputs)
        weight: PackedWeight = module.weight
        self._executor.emit(
            _cpu.head_linear,
            y,
            x,
            weight.kind,
            weight.values,
            bytes_of(weight.values) // module.num_heads,
            module.num_inputs,
            num_outputs,
            heads.start,
            len(heads),
            x.shape[1] // len(heads),
            rows=y.rows,
            name=module.name,
            work=lambda: head_linear_work(y, module),
        )
        return y

    def activate_and_multiply(self, x: Tensor, activation: str, clamp: GateClamp | None = None) -> Array:
        width = x.shape[1] // 2
        y = self._executor.allocate(rows_of(x), width)
        y.columns = x.columns[:1] if isinstance(x, Array) else ()
        begin, end = y.columns[0] if y.columns else (0, width)
        gate = _gate(activation, clamp)
        self._executor.emit(_cpu.activate_and_multiply, y, x, *gate, width, begin, end, rows=y.rows)
        return y

    def scale_and_add(self, x: Tensor, factor: float, other: Tensor | None) -> Array:
        y = self._executor.allocate(rows_of(x), x.shape[1])
        self._executor.emit(_cpu.scale_and_add, y, x, other, factor, x.shape[1], rows=y.rows)
        return y

    def multiply(self, x: Tensor, factors: Tensor | Factor) -> Array:
        y, columns = self._like(x)
        values, of_row = (factors.weight, 0) if isinstance(factors, Factor) else (factors, factors.shape[1])
        first = y.columns[0][0] if y.whole_width and of_row == y.whole_width else 0  # the factors are those of all columns
        self._executor.emit(_cpu.multiply, y, x, values, of_row, first, y.width, *columns, rows=y.rows)
        return y

    def query_factors(self, inputs: Inputs, module: Rotary) -> Array:
        table = PackedWeight(WEIGHT_KINDS.index("float32"), module.query_factors, is_in_panels=False)
        return self._look_up(table, inputs.positions, rows_of(module.query_factors).limit, 1, self._rows(inputs))

    def activate(self, x: Tensor, activation: str) -> Array:
        y, columns = self._like(x)
        self._executor.emit(_cpu.activate, y, x, *_gate(activation, None), y.width, *columns, rows=y.rows)
        return y

    def _like(self, x: Tensor) -> tuple[Array, tuple[int, int]]:
        """Allocate an array with the columns of `x`; return also their [begin, end) in memory."""
        y = self._executor.allocate(rows_of(x), x.shape[1])
        if isinstance(x, Array):
            y.columns, y.whole_width = x.columns, x.whole_width
        return y, y.columns[0] if len(y.columns) == 1 and not y.whole_width else (0, y.width)

    def join_rows(self, x: Tensor, count: int, counter: np.ndarray) -> Array:
        return self._executor.view(x, self._executor.rows(counter, 0, rows_of(x).limit // count), count * x.shape[1])

    def mean_rows(self, x: Tensor, count: int, counter: np.ndarray) -> Array:
        y = self._executor.allocate(self._executor.rows(counter, 0, rows_of(x).limit // count), x.shape[1])
        self._executor.emit(_cpu.mean_rows, y, x, count, x.shape[1], rows=y.rows)
        return y

    def adjust_columns(self, parts: Sequence[Tensor], module: ColumnRules) -> Array:
        y = self._executor.allocate(rows_of(parts[0]), module.width)
        if len(parts) == 1 and isinstance(parts[0], Array):
            y.columns = parts[0].columns
        at = 0
        for x, width in zip(parts, module.widths, strict=True):
            self._executor.emit(_cpu.adjust_columns, y, x, module.weight, width, at, y.width, rows=y.rows)
            at += width
        return y

    def all_gather(self, x: Tensor) -> Tensor:
        rank_group = self._executor.rank_group
        if not isinstance(x, Array) or not x.columns:
            return x
        ((begin, end),) = x.columns
        width = x.whole_width or x.width
        assert rank_group is not None, f"columns [{begin}, {end}) of {width}, but there is no rank group for the others"
        y = self._executor.allocate_gathered(x.rows, width)
        first = begin if width == x.width else 0
        self._executor.emit(
            _cpu.gather,
            y,
            x,
            rank_group.comm.address,
            width,
            x.width,
            begin,
            first,
            end - begin,
            rows=y.rows,
            work=lambda: Work(0 if x.address == y.address else 2 * 4 * (end - begin) * y.rows.count),
        )
        return y

    def route(self, inputs: AttentionMetadata, x: Tensor, module: Router) -> Routing:
        logits = self.linear(x, module.linear)
        if module.linear.adapters is not None:
            logits = self.adapt(inputs, logits, x, module.linear)
        rule = module.rule
        ids = self._executor.allocate_kept(logits.rows, rule.num_chosen)
        weights = self._executor.allocate(logits.rows, rule.num_chosen)
        self._executor.emit(
            _cpu.route,
            ids,
            weights,
            logits,
            module.correction,
            module.scales,
            module.num_experts,
            rule.num_chosen,
            rule.num_groups,
            rule.num_chosen_groups,
            rule.num_best,
            rule.scoring == "softmax",
            rule.is_normalized,
            rule.added_to_sum,
            rule.smallest_sum,
            rule.factor,
            None if module.set is None else inputs.expert_sets,
            module.set or 0,
            None if inputs is None else inputs.host_counts[NUM_TOKENS:],
            rows=logits.rows,
        )
        return Routing(ids, weights, getattr(inputs, "adapter_slots", None))

    def choose(self, routing: Routing, index: int) -> tuple[Routing, Array]:
        rows, executor = rows_of(routing.ids), self._executor
        ids, weights, factors = executor.allocate_kept(rows, 1), executor.allocate(rows, 1), executor.allocate(rows, 1)
        num_chosen = routing.ids.shape[1]
        executor.emit(_cpu.choose, ids, weights, factors, routing.ids, routing.weights, num_chosen, index, rows=rows)
        return Routing(ids, weights, routing.adapter_slots), factors

    def experts(self, x: Tensor, routing: Routing, module: Experts, activation: str, shared: Tensor | None = None) -> Array:
        rows, num_chosen = rows_of(x), routing.ids.shape[1]
        y = self._executor.allocate(rows, module.num_inputs)
        y.columns = module.down[0].columns
        assert not isinstance(shared, Array) or shared.columns == y.columns, f"{shared.columns} are added to {y.columns}"
        rank_group = None if module.owners is None or self._executor.rank_group is None else self._executor.rank_group.experts
        results = None if rank_group else self._executor.allocate(rows, num_chosen * module.num_inputs)
        packed: PackedExperts = module.weight
        self._executor.emit(
            _cpu.experts,
            y,
            results,
            x,
            routing.ids,
            routing.weights,
            shared,
            packed.slots,
            *(value for part in (packed.gate_up, packed.down) for value in _matrices(part)),
            *_gate(activation, module.clamp),
            module.is_gated,
            module.num_inputs,
            module.inner,
            module.num_experts,
            num_chosen,
            *(_windows(rank_group) if rank_group else (0, None, 0, 0, 1)),
            module.owners,
            module.counts,
            *self._share_of(module, rows, num_chosen),
            *_expert_adapters(module, routing),
            rows=rows,
            name=module.name,
            work=lambda: experts_work(y, x, routing, module),
        )
        return y

    def _share_of(self, module: Experts, rows: Rows, num_chosen: int) -> tuple[Any, ...]:
        """Return the part of each expert that the op computes and, if ranks share an expert, memory for its activations."""
        gate_up, down = module.gate_up[0].columns, module.down[0].columns
        panels = tuple([panel for part in panels_of(columns) for panel in part] for columns in (gate_up, down))
        if not module.is_cut:
            return 0, None, *panels, 0, module.inner, 0, module.num_inputs
        rank_group = self._executor.rank_group
        assert rank_group is not None, f"columns {gate_up} of {module.inner} twice, but there is no rank group for the others"
        activated = self._executor.allocate_gathered(rows, num_chosen * module.inner)
        return rank_group.comm.address, activated, *panels, *gate_up[0], *down[0]


def _adapted_panels(part: AdaptedPart, module: Linear) -> tuple[int, ...]:
    """Return a part for the op once for each range of panels that have columns of this rank. A panel is in one of them."""
    ranges: list[tuple[int, int]] = []
    for begin, end in module.columns or ((0, module.width),):
        first, last = max(begin, part.first) - part.first, min(end, part.first + part.num_outputs) - part.first
        if first < last:
            panels = first // _cpu.PANEL, -(-last // _cpu.PANEL)
            done = ranges[-1][1] if ranges else 0
            ranges.append((max(panels[0], done), max(panels[1], done)))
    own = part.first, part.num_outputs, part.index, part.a, part.b
    return tuple(number for begin, end in ranges if begin < end for number in (*own, begin, end))


def _expert_adapters(module: Experts, routing: Routing) -> tuple[Any, ...]:
    adapters = module.adapters
    if adapters is None:
        return None, None, None, 0, 0, 0, 0, 0, [], []
    panels = (
        [number for part in parts for number in _adapted_panels(part, linears[0])]
        for parts, linears in ((adapters.gate_up, module.gate_up), (adapters.down, module.down))
    )
    num_slots, slot_floats = adapters.slots.shape
    steps = adapters.index_step, adapters.float_step
    return (
        routing.adapter_slots,
        adapters.slots,
        adapters.ranks,
        num_slots,
        slot_floats,
        adapters.ranks.shape[1],
        *steps,
        *panels,
    )


def _windows(rank_group: ExpertRankGroup) -> tuple[Any, ...]:
    return rank_group.comm.address, rank_group.windows, rank_group.max_rows, rank_group.first_rank, rank_group.num_ranks


def _matrices(weight: PackedWeight) -> tuple[Any, ...]:
    scales = weight.scales, weight.multipliers, weight.offsets, weight.scale_kind
    return weight.kind, weight.values, *scales, weight.group_size, weight.bias


def _gate(activation: str, clamp: GateClamp | None) -> tuple[int, float, float]:
    """Return the activation's number, and alpha and limit of the clamp; limit 0: none."""
    return ACTIVATIONS.index(activation), *((0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit))


def make_table(executor: Executor) -> OpTable:
    """Return the table that sends ops to `executor` and gathers with its rank group."""
    ops: Any = CpuOps(executor)
    recurrent: Any = RecurrentOps(executor)
    return OpTable(
        name="native",
        max_head_dim=_cpu.MAX_HEAD_DIM,
        row_tile=1,
        pack=pack,
        layout=layout,
        stored=None,
        integer_kinds=("int8", "int4", "float4"),
        cache_view=cache_view,
        clear_block=clear_block,
        drawing=None,
        layer_memory=None,
        sync_free_ops={},
        begin=ops.begin,
        embedding=ops.embedding,
        take_features=ops.take_features,
        linear=ops.linear,
        adapt=ops.adapt,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        rotary_angles=ops.rotary_angles,
        rotate_and_store=ops.rotate_and_store,
        attention=ops.attention,
        keep_rows=ops.keep_rows,
        activate_and_multiply=ops.activate_and_multiply,
        take_rows=ops.take_rows,
        all_gather=ops.all_gather,
        route=ops.route,
        choose=ops.choose,
        experts=ops.experts,
        store_latent=ops.store_latent,
        latent_attention=ops.latent_attention,
        head_linear=ops.head_linear,
        layer_norm=ops.layer_norm,
        add_layer_norm=ops.add_layer_norm,
        normalize_wide=ops.normalize_wide,
        scale_and_add=ops.scale_and_add,
        multiply=ops.multiply,
        query_factors=ops.query_factors,
        activate=ops.activate,
        join_rows=ops.join_rows,
        mean_rows=ops.mean_rows,
        adjust_columns=ops.adjust_columns,
        convolve=recurrent.convolve,
        delta_rule=recurrent.delta_rule,
        state_space=recurrent.state_space,
        gated_norm=recurrent.gated_norm,
    )


TABLE = make_table(Immediate())
