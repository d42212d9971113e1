"""Reference backend: every op in plain Paddle, float32. Runs on any Paddle device and is the reference of every test.

Used by the worker if no native table fits the device. A row's bits depend only on that row, for these reasons:

- Rows always come in multiples of ROW_TILE. Paddle's elementwise kernels process the end of an array that is not a multiple of
  the vector width with scalar code, which rounds `exp` and `sqrt` differently; full tiles avoid that.
- A BLAS chooses its order of summation by the shape of a product and by the position of a row in it. So in a linear every row
  is a separate product, [1, in] x [in, OUTPUT_CHUNK], in one batch with the other rows and chunks.
- In attention each query has its own products [group, head_dim] x [head_dim, KEY_SPLIT] and [group, KEY_SPLIT] x [KEY_SPLIT,
  head_dim], in any tile; splits are counted from position 0 and added in order. The maximum is exact in any order, and a split
  with only masked keys adds exact zeros, so it can be omitted.
- Products read and write whole lines of LANES elements: other widths are padded with zeros, which change no sum. A BLAS treats
  operands that begin within a line with other code.
- Paddle joins the rows of a batched product into one when the other operand is not batched; hence at least two chunks of
  outputs in a linear, and at least two tiles in attention (`Inputs.num_tiles`).
- With several ranks (`rank_group.py`), each computes whole chunks and products of whole groups of query heads, and keeps its
  own columns and heads, so each product is the same as on one rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import paddle
from paddle.nn import functional

from ops.modules import (
    AdaptedPart,
    Adapters,
    AttentionShape,
    ColumnRules,
    Columns,
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
    Module,
    Norm,
    PositionTable,
    Rotary,
    Router,
    RoutingRule,
    Sinks,
    TypedPositions,
)
from ops.paddle.metadata import InPlace, derive, keep_drawn, quotient
from ops.paddle.progress import got_on, reporting
from ops.table import HAS_BOUNDS, KEY_SPLIT, ROW_TILE, AttentionMetadata, DeviceSampler, Inputs, OpTable, Routing, StepInputs
from ops.weight_format import Source, Store, float32

OUTPUT_CHUNK = 64  # small enough to stay in the caches, with its inputs, for all rows
LANES = 16  # float32 of a 64-byte line
MAX_SCORES = 1 << 23  # elements per attention pass (32 MiB): long prompts take several passes
MAX_GATHERED = 1 << 24  # elements of gathered expert weights (64 MiB), but at least one choice


@dataclass(frozen=True, slots=True)
class Chunks:
    """Weights of a linear [chunks, 1, in, OUTPUT_CHUNK], and the positions of the wanted outputs among all outputs of the
    chunks."""

    weights: paddle.Tensor
    own: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns of a result that this rank computes, from `begin` on, out of `width`."""

    tensor: paddle.Tensor
    begin: int
    width: int


@dataclass(frozen=True, slots=True)
class StackedChunks:
    """Chunks of all experts with the same columns, [experts, chunks, 1, in, OUTPUT_CHUNK], and views of each expert."""

    weights: paddle.Tensor
    own: tuple[slice, ...]
    each: list[Chunks]


@dataclass(frozen=True, slots=True)
class ExpertChunks:
    """Chunks of experts: every rank has all experts in its own memory."""

    gate_up: StackedChunks
    down: StackedChunks
    gate_up_bias: paddle.Tensor | None  # [experts, wanted outputs]
    down_bias: paddle.Tensor | None

    def arrays(self) -> tuple[()]:
        """Return no arrays: nothing has to be faulted in when an expert moves to a rank."""
        return ()


# -------------------------------------------------------------------------------------------------------- weights


def pack(module: Module, sources: Mapping[str, Source], store: Store) -> None:
    """Pack everything as float32, for any format of the module, without the store."""
    values = {name: float32(source()) for name, source in sources.items()}
    match module:
        case Linear():
            module.weight = _own_chunks(values["weight"], module.columns)
            if "bias" in values:
                own = [values["bias"][begin:end] for begin, end in module.columns or ((0, module.width),)]
                module.bias = paddle.to_tensor(np.concatenate(own))
        case HeadLinear():  # [heads, chunks, 1, in, OUTPUT_CHUNK]
            heads = module.weights_of_heads(values["weight"])
            module.weight = paddle.to_tensor(np.stack([_chunks(heads[head]) for head in module.heads]))
        case Embedding() | Norm():
            module.weight = paddle.to_tensor(values["weight"])
        case LayerNorm():
            module.weight, module.bias = paddle.to_tensor(values["weight"]), paddle.to_tensor(values["bias"])
        case PositionTable():
            module.values = values["weight"]
        case HeadNorm():  # [num_heads + num_kv_heads, width]
            weights = np.stack([values["queries"], values["keys"]])
            module.weight = paddle.to_tensor(np.repeat(weights, [module.num_heads, module.num_kv_heads], axis=0))
        case Rotary():
            module.cosines, module.sines = paddle.to_tensor(values["cosines"]), paddle.to_tensor(values["sines"])
            module.partners = paddle.to_tensor(values["partners"].astype(np.int32))
            if "query_factors" in values:
                module.query_factors = paddle.to_tensor(values["query_factors"])
        case Router():
            module.linear.weight = _own_chunks(values["weight"], ())
            module.linear.bias = paddle.to_tensor(values["bias"]) if "bias" in values else None
            module.correction = paddle.to_tensor(values["correction"].reshape(-1)) if "correction" in values else None
            module.scales = paddle.to_tensor(values["scales"]) if "scales" in values else None
        case Experts():
            parts = {
                part: _stacked([values[f"{part}.{index}"] for index in range(len(linears))], linears[0].columns)
                for part, linears in module.parts.items()
            }
            biases = [stacked_biases(module, part, values) for part in parts]
            module.weight = ExpertChunks(parts["gate_up"], parts["down"], *biases)
        case Sinks() | Factor():
            module.weight = paddle.to_tensor(values["weight"])
        case ColumnRules():
            module.weight = paddle.to_tensor(values["rules"])


def stacked_biases(module: Experts, part: str, values: Mapping[str, np.ndarray]) -> paddle.Tensor | None:
    """Return the biases of this rank's columns, [experts, columns]; None: there are none."""
    if not module.has_bias:
        return None
    linears = module.parts[part]
    ranges = linears[0].columns or ((0, linears[0].width),)
    biases = np.stack([values[f"{part}.{index}.bias"] for index in range(len(linears))])
    return paddle.to_tensor(np.concatenate([biases[:, begin:end] for begin, end in ranges], axis=1))


def _stacked(weights: Sequence[np.ndarray], columns: Columns) -> StackedChunks:
    first, own = _cut(weights[0], columns)
    stacked = np.empty((len(weights), *first.shape), np.float32)
    for expert, weight in enumerate(weights):
        stacked[expert] = _cut(weight, columns)[0]
    all_weights = paddle.to_tensor(stacked)
    return StackedChunks(all_weights, own, [Chunks(all_weights[expert], own) for expert in range(len(weights))])


def _own_chunks(weight: np.ndarray, columns: Columns) -> Chunks:
    chunks, own = _cut(weight, columns)
    return Chunks(paddle.to_tensor(chunks), own)


def _cut(weight: np.ndarray, columns: Columns) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Return the chunks of [out, in] with these columns (empty: all), and the positions of these among all columns of the
    chunks."""
    whole, ranges = _chunks(weight), columns or ((0, len(weight)),)
    places = sorted({place for begin, end in ranges for place in range(begin // OUTPUT_CHUNK, -(-end // OUTPUT_CHUNK))})
    firsts = [places.index(begin // OUTPUT_CHUNK) * OUTPUT_CHUNK + begin % OUTPUT_CHUNK for begin, _ in ranges]
    own = tuple(slice(first, first + end - begin) for first, (begin, end) in zip(firsts, ranges, strict=True))
    if len(places) == 1:  # at least two
        places.append(places[0] - 1)
    return whole[places], own


def _chunks(weight: np.ndarray) -> np.ndarray:
    """Return [out, in] as [chunks, 1, in, OUTPUT_CHUNK], both padded with zeros."""
    num_chunks = max(2, -(-len(weight) // OUTPUT_CHUNK))
    padding = (0, num_chunks * OUTPUT_CHUNK - len(weight)), (0, -weight.shape[1] % LANES)
    chunks = np.pad(weight, padding).reshape(num_chunks, 1, OUTPUT_CHUNK, -1)
    return np.ascontiguousarray(chunks.swapaxes(2, 3))


# ------------------------------------------------------------------------------------------------------------- cache


def cache_view(memory: np.ndarray, block_size: int) -> np.ndarray:
    """float32 [num_slots, heads of a block * head_dim]."""
    return memory.view(np.float32).reshape(len(memory) * block_size, -1)


def clear_block(cache: KvCache, block: int) -> None:
    slots = slice(block * cache.block_size, (block + 1) * cache.block_size)
    for layer in cache.layers:
        layer.keys[slots] = 0.0
        layer.values[slots] = 0.0


# ------------------------------------------------------------------------------------------------- a step's metadata


@dataclass(slots=True)
class AttentionStep:
    """Inputs of attention in a step, the same for every layer: T tiles of Q queries, S splits of KEY_SPLIT keys."""

    inputs: AttentionMetadata
    block_size: int
    query_positions: paddle.Tensor  # int32 [T, Q, 1]
    # by block table and window: int32 [T, S * KEY_SPLIT]; dummy slot 0 if no query of the tile sees a key
    key_slots: dict[tuple[int, int], paddle.Tensor] = field(default_factory=dict)
    # by these, the number of KV heads of the cache and the rank's range: int32 [T, S * heads * KEY_SPLIT]
    head_slots: dict[tuple[int, int, int, range], paddle.Tensor] = field(default_factory=dict)
    # by window, whether it is a chunk, and whether it is two-sided: float32 [T, Q, S, 1, 1, KEY_SPLIT], 0 or -inf
    masks: dict[tuple[int, bool, bool, bool], paddle.Tensor] = field(default_factory=dict)


def begin(inputs: Inputs, cache: KvCache) -> AttentionStep:
    """slot = block_table[seq, pos // block_size] * block_size + pos % block_size, on the device."""
    size = cache.block_size
    if inputs.is_made_on_device:
        derive(cast(InPlace, inputs), size)  # with the slots of the first block table
    positions = inputs.positions
    for number in range(inputs.is_made_on_device, len(inputs.block_tables)):
        tables = inputs.block_tables[number]
        blocks = paddle.gather(tables.flatten(), inputs.row_slots * tables.shape[1] + quotient(positions, size))
        paddle.assign(blocks * size + positions % size, output=inputs.slot_mappings[number])
    return _attention_step(inputs, size)


def _attention_step(inputs: AttentionMetadata, size: int) -> AttentionStep:
    queries = paddle.gather(inputs.positions, inputs.tile_row_ids[: inputs.num_tiles * inputs.tile_rows])
    return AttentionStep(inputs, size, queries.reshape([inputs.num_tiles, inputs.tile_rows, 1]))


def _key_slots(step: AttentionStep, table: int, window: int) -> paddle.Tensor:
    """Return the cache slots of the keys of each tile. Keys before the window of its first query may be in freed blocks, which
    other sequences write."""
    found = step.key_slots.get((table, window))
    if found is not None:
        return found
    inputs, size = step.inputs, step.block_size
    tiles, num_keys = inputs.num_tiles, inputs.num_key_splits * KEY_SPLIT
    num_blocks = -(-num_keys // size)
    in_blocks, in_keys = [tiles, num_blocks, size], [tiles, num_keys]
    blocks = paddle.gather(inputs.block_tables[table], inputs.tile_slots[:tiles])[:, :num_blocks]
    slots = _expand((blocks * size).unsqueeze(-1), in_blocks) + _expand(paddle.arange(size, dtype="int32"), in_blocks)
    slots = slots.reshape([tiles, num_blocks * size])[:, :num_keys]
    keys = _expand(paddle.arange(num_keys, dtype="int32"), in_keys)
    is_key = (keys < _expand(inputs.tile_contexts[:tiles].unsqueeze(-1), in_keys)).astype("int32")
    if window:  # a product, because XPUs have no logical_and
        is_key = is_key * (keys > _expand(step.query_positions[:, 0] - window, in_keys)).astype("int32")
    found = step.key_slots[table, window] = slots * is_key
    return found


def _head_slots(step: AttentionStep, shape: AttentionShape | LatentShape, cache: LayerCache, window: int) -> paddle.Tensor:
    """Return rows of the cache viewed as [num_slots * num_kv_heads, head_dim], in the order tile, split, head, key."""
    table, num_kv_heads, own = cache.table, cache.heads_of(shape), _kv_heads(shape, cache)
    key = table, window, num_kv_heads, own
    rows = step.head_slots.get(key)
    if rows is None:
        tiles, splits = step.inputs.num_tiles, step.inputs.num_key_splits
        in_splits = [tiles, splits, len(own), KEY_SPLIT]
        slots = _key_slots(step, table, window).reshape([tiles, splits, 1, KEY_SPLIT]) * num_kv_heads
        rows = _expand(slots, in_splits) + _expand(_arange(own).unsqueeze(-1), in_splits)
        rows = step.head_slots[key] = rows.reshape([tiles, splits * len(own) * KEY_SPLIT])
    return rows


def _kv_heads(shape: AttentionShape | LatentShape, cache: LayerCache) -> range:
    """Return the KV heads of the cache that this rank reads and writes."""
    first = cache.first_head + shape.heads.first_kv
    return range(first, first + shape.heads.kv_count)


def _arange(values: range) -> paddle.Tensor:
    return paddle.arange(values.start, values.stop, dtype="int32")


def _mask(step: AttentionStep, window: int, has_chunks: bool, is_two_sided: bool, has_bounds: bool) -> paddle.Tensor:
    key = window, has_chunks, is_two_sided, has_bounds
    mask = step.masks.get(key)
    if mask is None:
        inputs = step.inputs
        num_keys = inputs.num_key_splits * KEY_SPLIT
        shape = [inputs.num_tiles, inputs.tile_rows, num_keys]
        keys = _expand(paddle.arange(num_keys, dtype="int32"), shape)
        queries = _expand(step.query_positions, shape)
        is_hidden = keys > queries
        if has_bounds and inputs.host_counts[HAS_BOUNDS]:
            row_ids = inputs.tile_row_ids[: inputs.num_tiles * inputs.tile_rows]
            first, last = (
                _expand(paddle.gather(bound, row_ids).reshape([*shape[:2], 1]), shape)
                for bound in (inputs.first_keys, inputs.last_keys)
            )
            is_hidden = paddle.logical_or(keys < first, keys > last)
        if window:
            before = queries - queries % window - 1 if has_chunks else queries - window
            is_hidden = paddle.logical_or(is_hidden, keys <= before)
            if is_two_sided:
                is_hidden = paddle.logical_or(is_hidden, keys >= queries + window)
        mask = paddle.where(is_hidden, paddle.full(shape, -math.inf), paddle.zeros(shape))
        mask = step.masks[key] = mask.reshape([*shape[:2], inputs.num_key_splits, 1, 1, KEY_SPLIT])
    return mask


def _expand(x: paddle.Tensor, shape: list[int]) -> paddle.Tensor:
    """Expand, since Paddle's broadcasting within an operation is many times slower than this and the operation on equal
    shapes."""
    return paddle.expand(x, shape)


def _whole_lines(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` with its last axis padded to a multiple of LANES."""
    padding = -x.shape[-1] % LANES
    return paddle.concat([x, paddle.zeros([*x.shape[:-1], padding])], axis=-1) if padding else x


# ------------------------------------------------------------------------------------------------------------- ops


def embedding(inputs: Inputs, module: Embedding) -> paddle.Tensor:
    numbers = inputs.position_rows if isinstance(module, TypedPositions) else inputs.token_ids
    return paddle.gather(module.weight, numbers[: inputs.num_rows])


def take_features(step: AttentionStep, x: paddle.Tensor, number: int) -> paddle.Tensor:
    inputs, width = step.inputs, x.shape[1]
    assert inputs.features is not None, "the model has no media features"
    feature_rows = inputs.feature_rows[: inputs.num_rows].numpy()
    rows = np.flatnonzero(feature_rows >= 0)
    if not len(rows):
        return x
    features = float32(inputs.features[feature_rows[rows], number * width : (number + 1) * width])
    values, places = paddle.to_tensor(features), paddle.to_tensor(rows)
    return paddle.scatter(x, places, values + paddle.gather(x, places) if number else values)


def linear(x: paddle.Tensor, module: Linear) -> paddle.Tensor | Cut:
    y = _product(x, module.weight)
    y = y if module.bias is None else y + module.bias
    return Cut(y, module.columns[0][0], module.width) if module.columns else y


def adapt(step: Any, y: paddle.Tensor | Cut, x: paddle.Tensor, module: Linear) -> paddle.Tensor | Cut:
    """Multiply every row by each adapter in the step, and select the product of its own adapter. Adapters are in host memory
    and may change in each step."""
    inputs: AttentionMetadata = getattr(step, "inputs", step)  # a step of this table, or of one based on it
    own, adapters = own_columns(y), module.adapters
    assert adapters is not None, f"{module.name} has no adapters"
    row_slots = inputs.adapter_slots[: x.shape[0]].numpy()
    for slot in np.unique(row_slots[row_slots >= 0]).tolist():
        has_slot = _expand(paddle.to_tensor(row_slots == slot).unsqueeze(-1), own.shape)
        own = paddle.where(has_slot, own + _adapted(x, adapters, slot, module), own)
    return Cut(own, y.begin, y.width) if isinstance(y, Cut) else own


def _adapted(x: paddle.Tensor, adapters: Adapters, slot: int, module: Linear) -> paddle.Tensor:
    """Return the adapter's term for this rank's columns."""
    whole = paddle.concat([_adapted_part(x, adapters, slot, part) for part in adapters.parts], axis=1)
    return paddle.concat([whole[:, begin:end] for begin, end in module.columns], axis=1) if module.columns else whole


def _adapted_part(x: paddle.Tensor, adapters: Adapters, slot: int, part: AdaptedPart) -> paddle.Tensor:
    rank, memory = int(adapters.ranks[slot, part.index]), adapters.slots[slot]
    if not rank:
        return paddle.zeros([x.shape[0], part.num_outputs])
    room, num_panels = -(-rank // LANES) * LANES, -(-part.num_outputs // LANES)
    a = memory[part.a : part.a + x.shape[1] * room].reshape(-1, room)[:, :rank]
    panels = memory[part.b : part.b + num_panels * rank * LANES].reshape(num_panels, rank, LANES)
    b = panels.swapaxes(1, 2).reshape(-1, rank)[: part.num_outputs]
    return _product(_product(x, _own_chunks(a.T, ())), _own_chunks(b, ()))


def _product(x: paddle.Tensor, chunks: Chunks) -> paddle.Tensor:
    rows = x.shape[0]
    y = paddle.matmul(_whole_lines(x).reshape([1, rows, 1, -1]), chunks.weights)
    return _columns(y.reshape([-1, rows, OUTPUT_CHUNK]).transpose([1, 0, 2]).reshape([rows, -1]), chunks.own)


def _width(own: tuple[slice, ...]) -> int:
    return sum(part.stop - part.start for part in own)


def _columns(y: paddle.Tensor, own: tuple[slice, ...]) -> paddle.Tensor:
    """Return the wanted outputs among those of some chunks."""
    if y.shape[1] == _width(own):
        return y
    parts = [y[:, part] for part in own]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)


def own_columns(x: paddle.Tensor | Cut) -> paddle.Tensor:
    """Return this rank's columns of x."""
    return x.tensor if isinstance(x, Cut) else x


def rms_norm(x: paddle.Tensor, module: Norm) -> paddle.Tensor:
    return _normalize(x, module.weight, module.epsilon)


def add_rms_norm(x: paddle.Tensor, residual: paddle.Tensor, module: Norm) -> tuple[paddle.Tensor, paddle.Tensor]:
    total = x + residual
    return _normalize(total, module.weight, module.epsilon), total


def _normalize(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + epsilon) * weight


def layer_norm(x: paddle.Tensor, module: LayerNorm) -> paddle.Tensor:
    off = x - paddle.mean(x, axis=-1, keepdim=True)
    scale = paddle.rsqrt(paddle.mean(off * off, axis=-1, keepdim=True) + module.epsilon)
    return off * scale * module.weight + module.bias


def add_layer_norm(x: paddle.Tensor, residual: paddle.Tensor, module: LayerNorm) -> tuple[paddle.Tensor, paddle.Tensor]:
    total = x + residual
    return layer_norm(total, module), total


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles of each row."""

    cosines: paddle.Tensor  # [R, 1, head_dim]
    sines: paddle.Tensor
    partners: paddle.Tensor  # as in Rotary

    def rotated(self, x: paddle.Tensor) -> paddle.Tensor:
        """Rotate heads [R, heads, head_dim]."""
        cosines, sines = _expand(self.cosines, x.shape), _expand(self.sines, x.shape)
        return x * cosines + paddle.gather(x, self.partners, axis=-1) * sines


def rotary_angles(inputs: Inputs, module: Rotary) -> Angles:
    if module.is_by_row:
        cosines, sines = inputs.row_cosines[: inputs.num_rows], inputs.row_sines[: inputs.num_rows]
    else:
        positions = inputs.positions[: inputs.num_rows]
        cosines, sines = paddle.gather(module.cosines, positions), paddle.gather(module.sines, positions)
    return Angles(cosines.unsqueeze(1), sines.unsqueeze(1), module.partners)


def rotate_and_store(
    inputs: Inputs,
    qkv: paddle.Tensor | Cut,
    angles: Angles,
    norm: HeadNorm | None,
    shape: AttentionShape,
    cache: LayerCache,
) -> paddle.Tensor:
    own = shape.heads
    kv_count = own.kv_count if shape.has_keys else 0
    num_rotated = own.count + kv_count
    heads = own_columns(qkv).reshape([inputs.num_rows, num_rotated + kv_count, shape.head_dim])
    x = heads[:, :num_rotated]
    if norm is not None and norm.is_after_rotation:
        x = _normalize_heads(angles.rotated(x), norm, shape)
    else:
        x = angles.rotated(x if norm is None else _normalize_heads(x, norm, shape))
    if shape.has_keys:
        slots, values = inputs.slot_mappings[cache.table][: inputs.num_rows], heads[:, num_rotated:]
        if norm is not None and norm.has_values:
            values = values * paddle.rsqrt(paddle.mean(values * values, axis=-1, keepdim=True) + norm.epsilon)
        _store_heads(cache, cache.keys, slots, x[:, own.count :], shape)
        _store_heads(cache, cache.values, slots, values, shape)
    return x[:, : own.count].reshape([inputs.num_rows, -1])


def _normalize_heads(x: paddle.Tensor, norm: HeadNorm, shape: AttentionShape) -> paddle.Tensor:
    """All queries have the same weight, and so have all keys."""
    own = shape.heads
    first = shape.num_heads - own.count
    return _normalize(x, norm.weight[first : first + x.shape[1]], norm.epsilon)


def normalize_wide(qkv: paddle.Tensor, query_norm: Norm, key_norm: Norm, shape: AttentionShape) -> paddle.Tensor | Cut:
    queries, keys, values = paddle.split(qkv, [shape.queries_width, shape.keys_width, shape.keys_width], axis=-1)
    parts = _normalize_wide(queries, query_norm), _normalize_wide(keys, key_norm), values
    if shape.own is None:
        return paddle.concat(parts, axis=-1)
    own, dim = shape.own, shape.head_dim
    spans = ((own.first, own.count), (own.first_kv, own.kv_count), (own.first_kv, own.kv_count))
    own_parts = [part[:, first * dim : (first + count) * dim] for part, (first, count) in zip(parts, spans, strict=True)]
    return Cut(paddle.concat(own_parts, axis=-1), own.first * dim, qkv.shape[1])


def _normalize_wide(x: paddle.Tensor, norm: Norm) -> paddle.Tensor:
    if not norm.head_dim:
        return rms_norm(x, norm)
    heads = x.reshape([x.shape[0], -1, norm.head_dim])
    centered = heads - paddle.mean(heads, axis=-1, keepdim=True)
    return _normalize(centered, norm.weight.reshape([-1, norm.head_dim]), norm.epsilon).reshape(x.shape)


def _store_heads(
    cache: LayerCache, part: paddle.Tensor, slots: paddle.Tensor, heads: paddle.Tensor, shape: AttentionShape
) -> None:
    """Store the rank's KV heads [R, heads, head_dim] in keys or values; other heads are unchanged."""
    if shape.own is None and not cache.num_heads:
        paddle.scatter_(part, slots, heads.reshape([-1, shape.keys_width]))
        return
    own = _kv_heads(shape, cache)
    in_cache = [len(slots), len(own)]
    rows = _expand((slots * cache.heads_of(shape)).unsqueeze(-1), in_cache) + _expand(_arange(own), in_cache)
    paddle.scatter_(part.reshape([-1, shape.head_dim]), rows.flatten(), heads.reshape([-1, shape.head_dim]))


def attention(step: AttentionStep, queries: paddle.Tensor, shape: AttentionShape, cache: LayerCache) -> paddle.Tensor | Cut:
    dim = shape.head_dim
    keys, values = cache.keys.reshape([-1, dim]), cache.values.reshape([-1, dim])
    reach = cache, shape.sliding_window
    output = _attend_heads(step, queries * shape.score_scale, [keys], values, shape, reach)
    return output if shape.own is None else Cut(output, shape.own.first * dim, shape.queries_width)


def _attend_heads(
    step: AttentionStep,
    queries: paddle.Tensor,
    keys: list[paddle.Tensor],
    values: paddle.Tensor,
    shape: AttentionShape | LatentShape,
    reach: tuple[LayerCache, int],
) -> paddle.Tensor:
    """Attend with the rank's queries [R, heads * key_dim] -> [R, heads * value_dim]. `reach`: cache and window.
    If ranks share a KV head, the other ranks' queries of its group are zeros."""
    own, rows = shape.heads, queries.shape[0]
    group = shape.num_heads // shape.num_kv_heads
    count, first = own.count // own.kv_count, own.first % group
    queries = queries.reshape([rows, own.kv_count, count, -1])
    if count == group:
        return _attend_pages(step, queries, keys, values, shape, reach)
    sizes = ([rows, own.kv_count, others, queries.shape[-1]] for others in (first, group - first - count))
    before, after = ([paddle.zeros(size)] if size[2] else [] for size in sizes)
    queries = paddle.concat([*before, queries, *after], axis=2)
    output = _attend_pages(step, queries, keys, values, shape, reach)
    output = output.reshape([output.shape[0], own.kv_count, group, -1])[:, :, first : first + count]
    return output.reshape([output.shape[0], -1])


def _attend_pages(
    step: AttentionStep,
    queries: paddle.Tensor,
    keys: list[paddle.Tensor],
    values: paddle.Tensor,
    shape: AttentionShape | LatentShape,
    reach: tuple[LayerCache, int],
) -> paddle.Tensor:
    """Attend with queries [R, kv_heads, group, key_dim] of the rank's KV heads to the parts of keys, [slots * kv_heads, dim]
    each, side by side -> [R, kv_heads * group * value_dim]."""
    inputs = step.inputs
    softcap = shape.softcap if isinstance(shape, AttentionShape) else 0.0
    sinks = None
    if isinstance(shape, AttentionShape) and shape.sinks is not None:
        group_size = shape.num_heads // shape.num_kv_heads
        sinks = shape.sinks.weight.reshape([-1, group_size])[shape.heads.first_kv : shape.heads.first_kv + shape.heads.kv_count]
    heads, group = queries.shape[1:3]
    if inputs.tile_rows > 1:
        queries = paddle.gather(queries, inputs.tile_row_ids[: inputs.num_tiles * inputs.tile_rows])
    queries = queries.reshape([inputs.num_tiles, inputs.tile_rows, 1, *queries.shape[1:]])
    kind = (False, False, True)
    if isinstance(shape, AttentionShape):
        kind = (shape.has_chunks, shape.is_two_sided, shape.has_bounds)
    rows, mask = _head_slots(step, shape, *reach), _mask(step, reach[1], *kind)
    num_scores = inputs.num_tiles * inputs.tile_rows * inputs.num_key_splits * KEY_SPLIT * heads * group
    num_passes = min(inputs.num_tiles, -(-num_scores // MAX_SCORES))
    bounds = [inputs.num_tiles * index // num_passes for index in range(num_passes + 1)]
    kv_shape = [-1, 1, inputs.num_key_splits, heads, KEY_SPLIT]
    outputs = []
    for start, end in itertools.pairwise(bounds):
        pass_rows = rows[start:end].flatten()
        parts = [paddle.gather(part, pass_rows) for part in keys]
        pass_keys = (parts[0] if len(parts) == 1 else paddle.concat(parts, axis=-1)).reshape([*kv_shape, queries.shape[-1]])
        pass_values = paddle.gather(values, pass_rows).reshape([*kv_shape, values.shape[-1]])
        outputs.append(_attend(queries[start:end], pass_keys, pass_values, mask[start:end], softcap, sinks))
        got_on()
    output = outputs[0] if len(outputs) == 1 else paddle.concat(outputs)
    output = output.reshape([-1, heads * group * values.shape[-1]])
    return output if inputs.tile_rows == 1 else paddle.gather(output, inputs.row_queries[: inputs.num_rows])


def _attend(
    queries: paddle.Tensor,
    keys: paddle.Tensor,
    values: paddle.Tensor,
    mask: paddle.Tensor,
    softcap: float,
    sinks: paddle.Tensor | None,
) -> paddle.Tensor:
    """[T, Q, 1, H, G, D] against keys [T, 1, S, H, KEY_SPLIT, D], values [T, 1, S, H, KEY_SPLIT, V] and sinks [H, G] -> [T, Q,
    H, G, V]."""
    dim = values.shape[-1]
    queries, keys, values = _whole_lines(queries), _whole_lines(keys), _whole_lines(values)
    scores = paddle.matmul(queries, keys, transpose_y=True)
    if softcap:
        scores = paddle.tanh(scores * (1.0 / softcap)) * softcap
    scores = scores + _expand(mask, scores.shape)
    largest = paddle.max(scores, axis=-1, keepdim=True)
    if scores.shape[2] > 1:
        largest = paddle.max(largest, axis=2, keepdim=True)
    if sinks is not None:
        sinks = _expand(sinks.reshape([1, 1, 1, *sinks.shape, 1]), largest.shape)
        largest = paddle.maximum(largest, sinks)
    weights = paddle.exp(scores - _expand(largest, scores.shape))
    sums, sums_of_values = paddle.sum(weights, axis=-1, keepdim=True), paddle.matmul(weights, values)
    sum_of_all = _add_splits(sums)
    if sinks is not None:  # whole lines, like every exponential
        lines = [*largest.shape[:-1], LANES]
        of_sinks = paddle.exp(_expand(sinks, lines) - _expand(largest, lines))
        sum_of_all = sum_of_all + of_sinks[..., :1].squeeze(2)
    output = _add_splits(sums_of_values) / sum_of_all
    return output if output.shape[-1] == dim else output[..., :dim]


def _add_splits(x: paddle.Tensor) -> paddle.Tensor:
    """Return the sum over axis 2, one split after another."""
    if x.shape[2] == 1:
        return x.squeeze(2)
    return paddle.add_n(paddle.unbind(x, axis=2))


def keep_rows(step: AttentionStep, *tensors: paddle.Tensor) -> tuple[Any, ...]:
    kept = cast(StepInputs, step.inputs).kept  # the step is that of `begin`
    row_ids = kept.row_ids[: kept.num_rows]
    return _attention_step(kept, step.block_size), *(paddle.gather(x, row_ids) for x in tensors)


def store_latent(
    inputs: Inputs,
    queries: paddle.Tensor | Cut,
    compressed: paddle.Tensor,
    angles: Angles,
    norm: Norm,
    shape: LatentShape,
    cache: LayerCache,
) -> paddle.Tensor:
    slots = inputs.slot_mappings[cache.table][: inputs.num_rows]
    latents, keys = compressed[:, : shape.latent_dim], compressed[:, shape.latent_dim :].unsqueeze(1)
    paddle.scatter_(cache.keys, slots, angles.rotated(keys).squeeze(1))
    paddle.scatter_(cache.values, slots, _normalize(latents, norm.weight, norm.epsilon))
    heads = own_columns(queries).reshape([inputs.num_rows, shape.heads.count, shape.head_dim])
    rotated = angles.rotated(heads[:, :, shape.plain_dim :])
    return paddle.concat([heads[:, :, : shape.plain_dim], rotated], axis=-1).reshape([inputs.num_rows, -1])


def latent_attention(
    step: AttentionStep, absorbed: paddle.Tensor | Cut, queries: paddle.Tensor, shape: LatentShape, cache: LayerCache
) -> paddle.Tensor:
    heads = [queries.shape[0], shape.heads.count, -1]
    rotated = queries.reshape(heads)[..., shape.plain_dim :]
    both = paddle.concat([own_columns(absorbed).reshape(heads), rotated], axis=-1) * shape.scale
    return _attend_heads(step, both.reshape([heads[0], -1]), [cache.values, cache.keys], cache.values, shape, (cache, 0))


def head_linear(x: paddle.Tensor, module: HeadLinear) -> paddle.Tensor | Cut:
    rows, heads = x.shape[0], len(module.heads)
    x = x.reshape([rows, heads, -1])[:, :, : module.num_inputs].transpose([1, 0, 2])
    chunks = paddle.matmul(_whole_lines(x).reshape([heads, 1, rows, 1, -1]), module.weight)
    y = chunks.reshape([heads, -1, rows, OUTPUT_CHUNK]).transpose([2, 0, 1, 3]).reshape([rows, heads, -1])
    y = y[:, :, : module.num_outputs].reshape([rows, -1])
    if heads == module.num_heads:
        return y
    return Cut(y, module.heads.start * module.num_outputs, module.num_heads * module.num_outputs)


def activate_and_multiply(x: paddle.Tensor | Cut, activation: str, clamp: GateClamp | None = None) -> paddle.Tensor | Cut:
    gate, up = paddle.split(own_columns(x), 2, axis=-1)
    if clamp is None:
        y = _ACTIVATIONS[activation](gate) * up
    else:
        gate, up = paddle.clip(gate, max=clamp.limit), paddle.clip(up, min=-clamp.limit, max=clamp.limit)
        y = gate * functional.sigmoid(gate * clamp.alpha) * (up + 1.0)
    return Cut(y, x.begin, x.width // 2) if isinstance(x, Cut) else y


def scale_and_add(x: paddle.Tensor, factor: float, other: paddle.Tensor | None) -> paddle.Tensor:
    scaled = x if factor == 1.0 else x * factor
    return scaled if other is None else scaled + other


def multiply(x: paddle.Tensor | Cut, factors: paddle.Tensor | Factor) -> paddle.Tensor | Cut:
    own = own_columns(x)
    values = factors.weight.reshape([1, 1]) if isinstance(factors, Factor) else factors
    return _like(x, own * _expand(values, own.shape))


def query_factors(inputs: Inputs, module: Rotary) -> paddle.Tensor:
    return paddle.gather(module.query_factors, inputs.positions[: inputs.num_rows])


def activate(x: paddle.Tensor | Cut, activation: str) -> paddle.Tensor | Cut:
    return _like(x, _ACTIVATIONS[activation](own_columns(x)))


def _like(x: paddle.Tensor | Cut, own: paddle.Tensor) -> paddle.Tensor | Cut:
    """Return this rank's columns `own` as those that x has."""
    return Cut(own, x.begin, x.width) if isinstance(x, Cut) else own


def join_rows(x: paddle.Tensor, count: int, counter: np.ndarray) -> paddle.Tensor:
    return x.reshape([-1, count * x.shape[1]])


def mean_rows(x: paddle.Tensor, count: int, counter: np.ndarray) -> paddle.Tensor:
    return paddle.add_n(paddle.unbind(x.reshape([-1, count, x.shape[1]]), axis=1)) * (1.0 / count)


def adjust_columns(parts: Sequence[paddle.Tensor], module: ColumnRules) -> paddle.Tensor:
    x = parts[0] if len(parts) == 1 else paddle.concat(list(parts), axis=1)
    factors, shifts, lows, highs = (_expand(rule, x.shape) for rule in paddle.split(module.weight, 4))
    return paddle.minimum(paddle.maximum(x * factors + shifts, lows), highs)


def take_rows(x: paddle.Tensor, row_ids: paddle.Tensor) -> paddle.Tensor:
    return paddle.gather(x, row_ids)


def route(step: AttentionStep, x: paddle.Tensor, module: Router) -> Routing:
    logits, rule = own_columns(linear(x, module.linear)), module.rule
    if rule.scoring == "softmax":
        weights = paddle.exp(logits - _expand(paddle.max(logits, axis=-1, keepdim=True), logits.shape))
        scores = weights / _expand(paddle.sum(weights, axis=-1, keepdim=True), logits.shape)
    else:
        scores = functional.sigmoid(logits)
    left = scores if module.correction is None else scores + _expand(module.correction, scores.shape)
    ids = _largest(_in_best_groups(left, rule), rule.num_chosen)
    chosen = paddle.take_along_axis(scores, ids, axis=1)
    if rule.is_normalized:
        total = paddle.add_n(paddle.unbind(chosen, axis=1)).unsqueeze(1) + rule.added_to_sum
        chosen = chosen / _expand(paddle.clip(total, min=rule.smallest_sum), chosen.shape)
    weights = chosen * rule.factor
    if module.scales is not None:
        weights = weights * paddle.gather(module.scales, ids.flatten()).reshape(weights.shape)
    if module.set is None:
        return Routing(ids, weights)
    is_own = _expand((step.inputs.expert_sets[: x.shape[0]] == module.set).unsqueeze(-1), ids.shape)
    return Routing(
        paddle.where(is_own, ids, paddle.full_like(ids, -1)), paddle.where(is_own, weights, paddle.zeros_like(weights))
    )


def _in_best_groups(scores: paddle.Tensor, rule: RoutingRule) -> paddle.Tensor:
    """Return the scores, -inf for experts of other groups."""
    if rule.num_groups == 1:
        return scores
    rows, size = scores.shape[0], scores.shape[1] // rule.num_groups
    grouped = scores.reshape([rows, rule.num_groups, size])
    best = _largest(paddle.topk(grouped, min(rule.num_best, size))[0].sum(axis=-1), rule.num_chosen_groups)
    groups = paddle.arange(rule.num_groups, dtype="int32").reshape([1, 1, -1]) == best.unsqueeze(-1)
    is_kept = _expand(paddle.any(groups, axis=1).unsqueeze(-1), grouped.shape)
    return paddle.where(is_kept, grouped, paddle.full_like(grouped, -math.inf)).reshape(scores.shape)


def choose(routing: Routing, index: int) -> tuple[Routing, paddle.Tensor]:
    ids, factors = (each[:, index : index + 1].contiguous() for each in (routing.ids, routing.weights))
    return Routing(ids, paddle.ones_like(factors)), factors


def draw_largest(inputs: StepInputs, logits: paddle.Tensor) -> paddle.Tensor:
    """Run `DeviceSampler.run` at temperature 0."""
    tokens = largest(logits)
    if inputs.is_made_on_device:
        keep_drawn(inputs, tokens)
    return tokens.reshape([1, -1])


def largest(logits: paddle.Tensor) -> paddle.Tensor:
    """[m, vocab] -> int32 [m]: the first NaN if there is any, like the native sampler, otherwise the first of the largest."""
    width = logits.shape[1]
    is_number = logits == logits
    numbers = paddle.where(is_number, logits, paddle.full_like(logits, -math.inf))
    is_largest = numbers == _expand(paddle.max(numbers, axis=-1, keepdim=True), logits.shape)
    from_last = _from_last(logits.shape)
    ranked = paddle.where(is_number, paddle.where(is_largest, from_last, paddle.zeros_like(from_last)), from_last + width)
    return ((width - 1) - paddle.max(ranked, axis=-1, keepdim=True) % width).flatten()


def _from_last(shape: list[int]) -> paddle.Tensor:
    """Return int32 [R, n]: n - 1, n - 2, ..., 0 in each row."""
    return _expand((shape[1] - 1) - paddle.arange(shape[1], dtype="int32"), shape)


def _largest(values: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return int32 [R, count]: indices of the largest of [R, n], the largest first; ties go to the first."""
    last, from_last = values.shape[1] - 1, _from_last(values.shape)
    found = []
    for _ in range(count):
        is_largest = values == _expand(paddle.max(values, axis=-1, keepdim=True), values.shape)
        first = paddle.max(paddle.where(is_largest, from_last, paddle.zeros_like(from_last)), axis=-1, keepdim=True)
        values = paddle.where(from_last == first, paddle.full_like(values, -math.inf), values)
        found.append(last - first)
    return paddle.concat(found, axis=1)


def experts(
    x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
) -> paddle.Tensor:
    ids = routing.ids.numpy().reshape(-1)
    choices = np.arange(len(ids))
    gate_up = expert_products(x, choices // routing.ids.shape[1], ids, module, "gate_up")
    activated = own_columns(activate_and_multiply(gate_up, activation, module.clamp))
    return add_choices(expert_products(activated, choices, ids, module, "down"), routing, shared)


def expert_products(x: paddle.Tensor, rows: np.ndarray, ids: np.ndarray, module: Experts, part: str) -> paddle.Tensor:
    """Return [n, out]: row rows[i] of x times the weights of a part of expert ids[i], plus its bias. Computed expert by expert,
    with rows padded to whole tiles by copies of the first. Expert -1 means none and gives zeros."""
    experts, biases = getattr(module.weight, part), getattr(module.weight, f"{part}_bias")
    results = paddle.zeros([len(ids), _width(experts.own)])
    for expert in np.unique(ids[ids >= 0]).tolist():
        own = np.flatnonzero(ids == expert)
        places = np.append(own, np.repeat(own[:1], -len(own) % ROW_TILE))
        products = _product(paddle.gather(x, paddle.to_tensor(rows[places])), experts.each[expert])
        products = products if biases is None else products + biases[expert]
        paddle.scatter_(results, paddle.to_tensor(places), products)
    return results


def sync_free_experts(
    x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Compute `experts` without reading on the host which experts rows have. The same bits, since a row's product does not
    depend on other rows."""
    ids = paddle.clip(routing.ids, min=0).flatten()
    gate_up = sync_free_products(rows_of_choices(x, routing), ids, module, "gate_up")
    activated = own_columns(activate_and_multiply(gate_up, activation, module.clamp))
    return add_choices(sync_free_products(activated, ids, module, "down"), routing, shared)


def rows_of_choices(x: paddle.Tensor, routing: Routing) -> paddle.Tensor:
    """Return [R * chosen, in] from rows [R, in]: the row of each choice."""
    rows, num_chosen = routing.ids.shape
    return _expand(x.unsqueeze(1), [rows, num_chosen, x.shape[1]]).reshape([rows * num_chosen, x.shape[1]])


def sync_free_products(x: paddle.Tensor, ids: paddle.Tensor, module: Experts, part: str) -> paddle.Tensor:
    """Return [n, out]: row i of x [n, in] times the weights of a part of expert ids[i], plus its bias. Weights are read once
    per choice, while `expert_products` reads them once for all rows of the expert, but must read the choices on the host."""
    experts, biases = getattr(module.weight, part), getattr(module.weight, f"{part}_bias")
    num_chunks, width = experts.weights.shape[1], experts.weights.shape[3]
    num_each = max(1, MAX_GATHERED // (num_chunks * width * OUTPUT_CHUNK))
    x, outputs = _whole_lines(x), []
    for begin in range(0, x.shape[0], num_each):
        end = min(begin + num_each, x.shape[0])
        in_chunks = [end - begin, num_chunks, 1, width]
        weights = paddle.gather(experts.weights, ids[begin:end]).reshape([*in_chunks[:2], width, OUTPUT_CHUNK])
        y = paddle.matmul(_expand(x[begin:end].reshape([end - begin, 1, 1, width]), in_chunks), weights)
        outputs.append(y.reshape([end - begin, -1]))
    products = _columns(outputs[0] if len(outputs) == 1 else paddle.concat(outputs), experts.own)
    return products if biases is None else products + paddle.gather(biases, ids)


def add_choices(results: paddle.Tensor, routing: Routing, shared: paddle.Tensor | None) -> paddle.Tensor:
    """Return [R, n]: the weighted results of each row's choices [R * chosen, n], added in order, and then the shared ones."""
    rows, num_chosen = routing.weights.shape
    shape = [rows, num_chosen, results.shape[1]]
    weighed = results.reshape(shape) * _expand(routing.weights.unsqueeze(-1), shape)
    parts = paddle.unbind(weighed, axis=1)
    return paddle.add_n([*parts, *([] if shared is None else [shared])])


_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * functional.sigmoid(x * 1.702),
    "relu": functional.relu,
    "tanh": paddle.tanh,
    "sigmoid": functional.sigmoid,
    "relu2": lambda x: paddle.square(functional.relu(x)),
}

TABLE = OpTable(
    name="reference",
    max_head_dim=None,
    row_tile=ROW_TILE,
    pack=pack,
    layout=None,
    integer_kinds=(),
    cache_view=cache_view,
    clear_block=clear_block,
    drawing=DeviceSampler(draw_largest, is_greedy=True),
    sync_free_ops={"experts": sync_free_experts},
    begin=reporting(begin),
    embedding=embedding,
    take_features=take_features,
    linear=reporting(linear),
    adapt=adapt,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotary_angles=rotary_angles,
    rotate_and_store=reporting(rotate_and_store),
    normalize_wide=normalize_wide,
    attention=reporting(attention),
    keep_rows=keep_rows,
    activate_and_multiply=reporting(activate_and_multiply),
    scale_and_add=scale_and_add,
    multiply=multiply,
    query_factors=query_factors,
    take_rows=take_rows,
    all_gather=lambda x: x,  # single rank
    route=reporting(route),
    choose=choose,
    experts=reporting(experts),
    store_latent=reporting(store_latent),
    latent_attention=reporting(latent_attention),
    head_linear=reporting(head_linear),
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    activate=activate,
    join_rows=join_rows,
    mean_rows=mean_rows,
    adjust_columns=adjust_columns,
)
