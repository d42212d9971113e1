"""Attention over pages of the KV cache, also with latents."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import paddle

from ops.modules import AttentionShape, KvCache, LatentShape, LayerCache, Norm
from ops.paddle.progress import got_on
from ops.paddle.reference.chunks import LANES, Cut, expand, own_columns, whole_lines
from ops.paddle.reference.linears import normalize
from ops.paddle.reference.rotation import Angles, arange, kv_heads
from ops.paddle.reference.step import AttentionStep, attention_step
from ops.table import HAS_BOUNDS, KEY_SPLIT, Inputs, StepInputs
from ops.weight_format import float32

MAX_SCORES = 1 << 23  # elements per attention pass (32 MiB): long prompts take several passes


def cache_view(memory: np.ndarray, block_size: int) -> np.ndarray:
    """float32 [num_slots, heads of a block * head_dim]."""
    return memory.view(np.float32).reshape(len(memory) * block_size, -1)


def clear_block(cache: KvCache, block: int) -> None:
    slots = slice(block * cache.block_size, (block + 1) * cache.block_size)
    for layer in cache.layers:
        layer.keys[slots] = 0.0
        layer.values[slots] = 0.0


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
    slots = expand((blocks * size).unsqueeze(-1), in_blocks) + expand(paddle.arange(size, dtype="int32"), in_blocks)
    slots = slots.reshape([tiles, num_blocks * size])[:, :num_keys]
    keys = expand(paddle.arange(num_keys, dtype="int32"), in_keys)
    is_key = (keys < expand(inputs.tile_contexts[:tiles].unsqueeze(-1), in_keys)).astype("int32")
    if window:  # a product, because XPUs have no logical_and
        is_key = is_key * (keys > expand(step.query_positions[:, 0] - window, in_keys)).astype("int32")
    found = step.key_slots[table, window] = slots * is_key
    return found


def _head_slots(step: AttentionStep, shape: AttentionShape | LatentShape, cache: LayerCache, window: int) -> paddle.Tensor:
    """Return rows of the cache viewed as [num_slots * num_kv_heads, head_dim], in the order tile, split, head, key."""
    table, num_kv_heads, own = cache.table, cache.heads_of(shape), kv_heads(shape, cache)
    key = table, window, num_kv_heads, own
    rows = step.head_slots.get(key)
    if rows is None:
        tiles, splits = step.inputs.num_tiles, step.inputs.num_key_splits
        in_splits = [tiles, splits, len(own), KEY_SPLIT]
        slots = _key_slots(step, table, window).reshape([tiles, splits, 1, KEY_SPLIT]) * num_kv_heads
        rows = expand(slots, in_splits) + expand(arange(own).unsqueeze(-1), in_splits)
        rows = step.head_slots[key] = rows.reshape([tiles, splits * len(own) * KEY_SPLIT])
    return rows


def _mask(step: AttentionStep, window: int, has_chunks: bool, is_two_sided: bool, has_bounds: bool) -> paddle.Tensor:
    key = window, has_chunks, is_two_sided, has_bounds
    mask = step.masks.get(key)
    if mask is None:
        inputs = step.inputs
        num_keys = inputs.num_key_splits * KEY_SPLIT
        shape = [inputs.num_tiles, inputs.tile_rows, num_keys]
        keys = expand(paddle.arange(num_keys, dtype="int32"), shape)
        queries = expand(step.query_positions, shape)
        is_hidden = keys > queries
        if has_bounds and inputs.host_counts[HAS_BOUNDS]:
            row_ids = inputs.tile_row_ids[: inputs.num_tiles * inputs.tile_rows]
            first, last = (
                expand(paddle.gather(bound, row_ids).reshape([*shape[:2], 1]), shape)
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
    queries, keys, values = whole_lines(queries), whole_lines(keys), whole_lines(values)
    scores = paddle.matmul(queries, keys, transpose_y=True)
    if softcap:
        scores = paddle.tanh(scores * (1.0 / softcap)) * softcap
    scores = scores + expand(mask, scores.shape)
    largest = paddle.max(scores, axis=-1, keepdim=True)
    if scores.shape[2] > 1:
        largest = paddle.max(largest, axis=2, keepdim=True)
    if sinks is not None:
        sinks = expand(sinks.reshape([1, 1, 1, *sinks.shape, 1]), largest.shape)
        largest = paddle.maximum(largest, sinks)
    weights = paddle.exp(scores - expand(largest, scores.shape))
    sums, sums_of_values = paddle.sum(weights, axis=-1, keepdim=True), paddle.matmul(weights, values)
    sum_of_all = _add_splits(sums)
    if sinks is not None:  # whole lines, like every exponential
        lines = [*largest.shape[:-1], LANES]
        of_sinks = paddle.exp(expand(sinks, lines) - expand(largest, lines))
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
    return attention_step(kept, step.block_size), *(paddle.gather(x, row_ids) for x in tensors)


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
    paddle.scatter_(cache.values, slots, normalize(latents, norm.weight, norm.epsilon))
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
