"""Rotary positions and norms of heads, and writing keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from ops.modules import AttentionShape, HeadNorm, LatentShape, LayerCache, Norm, Rotary
from ops.paddle.reference.chunks import Cut, expand, own_columns
from ops.paddle.reference.linears import normalize, rms_norm
from ops.table import Inputs


def kv_heads(shape: AttentionShape | LatentShape, cache: LayerCache) -> range:
    """Return the KV heads of the cache that this rank reads and writes."""
    first = cache.first_head + shape.heads.first_kv
    return range(first, first + shape.heads.kv_count)


def arange(values: range) -> paddle.Tensor:
    return paddle.arange(values.start, values.stop, dtype="int32")


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles of each row."""

    cosines: paddle.Tensor  # [R, 1, head_dim]
    sines: paddle.Tensor
    partners: paddle.Tensor  # as in Rotary

    def rotated(self, x: paddle.Tensor) -> paddle.Tensor:
        """Rotate heads [R, heads, head_dim]."""
        cosines, sines = expand(self.cosines, x.shape), expand(self.sines, x.shape)
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
    return normalize(x, norm.weight[first : first + x.shape[1]], norm.epsilon)


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
    return normalize(centered, norm.weight.reshape([-1, norm.head_dim]), norm.epsilon).reshape(x.shape)


def _store_heads(
    cache: LayerCache, part: paddle.Tensor, slots: paddle.Tensor, heads: paddle.Tensor, shape: AttentionShape
) -> None:
    """Store the rank's KV heads [R, heads, head_dim] in keys or values; other heads are unchanged."""
    if shape.own is None and not cache.num_heads:
        paddle.scatter_(part, slots, heads.reshape([-1, shape.keys_width]))
        return
    own = kv_heads(shape, cache)
    in_cache = [len(slots), len(own)]
    rows = expand((slots * cache.heads_of(shape)).unsqueeze(-1), in_cache) + expand(arange(own), in_cache)
    paddle.scatter_(part.reshape([-1, shape.head_dim]), rows.flatten(), heads.reshape([-1, shape.head_dim]))


def query_factors(inputs: Inputs, module: Rotary) -> paddle.Tensor:
    return paddle.gather(module.query_factors, inputs.positions[: inputs.num_rows])
