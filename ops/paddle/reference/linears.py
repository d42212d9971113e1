"""Embeddings, linears with adapters, norms and elementwise ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

from ops.modules import (
    AdaptedPart,
    Adapters,
    ColumnRules,
    Columns,
    Embedding,
    Factor,
    GateClamp,
    HeadLinear,
    LayerNorm,
    Linear,
    Norm,
    TypedPositions,
)
from ops.paddle.reference.chunks import (
    LANES,
    OUTPUT_CHUNK,
    Cut,
    expand,
    like,
    own_chunks,
    own_columns,
    part_of,
    product,
    whole_lines,
)
from ops.table import AttentionMetadata, Inputs


def embedding(inputs: Inputs, module: Embedding) -> paddle.Tensor:
    if isinstance(module, TypedPositions):
        return paddle.gather(module.weight, inputs.position_rows[: inputs.num_rows])
    token_ids = inputs.token_ids[: inputs.num_rows]
    for token_id, other in inputs.same_inputs:  # a device's rows have the tokens themselves
        token_ids = token_ids + (token_ids == token_id).astype("int32") * (other - token_id)
    return paddle.gather(module.weight, token_ids)


def linear(x: paddle.Tensor, module: Linear) -> paddle.Tensor | Cut:
    y = product(x, module.weight)
    y = y if module.bias is None else y + module.bias
    return Cut(y, module.columns[0][0], module.width, module.columns) if module.columns else y


def adapt(step: Any, y: paddle.Tensor | Cut, x: paddle.Tensor, module: Linear) -> paddle.Tensor | Cut:
    """Multiply every row by each adapter in the step, and select the product of its own adapter. Adapters are in host memory
    and may change in each step."""
    inputs: AttentionMetadata = getattr(step, "inputs", step)  # a step of this table, or of one based on it
    own, adapters = own_columns(y), module.adapters
    assert adapters is not None, f"{module.name} has no adapters"
    own = add_adapted(own, x, inputs.adapter_slots[: x.shape[0]].numpy(), adapters, module.columns)
    return Cut(own, y.begin, y.width) if isinstance(y, Cut) else own


def add_adapted(
    y: paddle.Tensor, x: paddle.Tensor, row_slots: np.ndarray, adapters: Adapters, columns: Columns
) -> paddle.Tensor:
    for slot in np.unique(row_slots[row_slots >= 0]).tolist():
        has_slot = expand(paddle.to_tensor(row_slots == slot).unsqueeze(-1), y.shape)
        y = paddle.where(has_slot, y + _adapted(x, adapters, slot, columns), y)
    return y


def _adapted(x: paddle.Tensor, adapters: Adapters, slot: int, columns: Columns) -> paddle.Tensor:
    """Return the adapter's term for this rank's columns."""
    whole = paddle.concat([_adapted_part(x, adapters, slot, part) for part in adapters.parts], axis=1)
    return paddle.concat([whole[:, begin:end] for begin, end in columns], axis=1) if columns else whole


def _adapted_part(x: paddle.Tensor, adapters: Adapters, slot: int, part: AdaptedPart) -> paddle.Tensor:
    rank, memory = int(adapters.ranks[slot, part.index]), adapters.slots[slot]
    if not rank:
        return paddle.zeros([x.shape[0], part.num_outputs])
    room, num_panels = -(-rank // LANES) * LANES, -(-part.num_outputs // LANES)
    a = memory[part.a : part.a + x.shape[1] * room].reshape(-1, room)[:, :rank]
    panels = memory[part.b : part.b + num_panels * rank * LANES].reshape(num_panels, rank, LANES)
    b = panels.swapaxes(1, 2).reshape(-1, rank)[: part.num_outputs]
    return product(product(x, own_chunks(a.T, ())), own_chunks(b, ()))


def rms_norm(x: paddle.Tensor, module: Norm) -> paddle.Tensor:
    return normalize(x, module.weight, module.epsilon)


def add_rms_norm(x: paddle.Tensor, residual: paddle.Tensor, module: Norm) -> tuple[paddle.Tensor, paddle.Tensor]:
    total = x + residual
    return normalize(total, module.weight, module.epsilon), total


def normalize(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + epsilon) * weight


def layer_norm(x: paddle.Tensor, module: LayerNorm) -> paddle.Tensor:
    off = x - paddle.mean(x, axis=-1, keepdim=True)
    scale = paddle.rsqrt(paddle.mean(off * off, axis=-1, keepdim=True) + module.epsilon)
    return off * scale * module.weight + module.bias


def add_layer_norm(x: paddle.Tensor, residual: paddle.Tensor, module: LayerNorm) -> tuple[paddle.Tensor, paddle.Tensor]:
    total = x + residual
    return layer_norm(total, module), total


def head_linear(x: paddle.Tensor, module: HeadLinear) -> paddle.Tensor | Cut:
    rows, heads = x.shape[0], len(module.heads)
    x = x.reshape([rows, heads, -1])[:, :, : module.num_inputs].transpose([1, 0, 2])
    chunks = paddle.matmul(whole_lines(x).reshape([heads, 1, rows, 1, -1]), module.weight)
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
    return like(x, own * expand(values, own.shape))


def activate(x: paddle.Tensor | Cut, activation: str) -> paddle.Tensor | Cut:
    return like(x, _ACTIVATIONS[activation](own_columns(x)))


def join_rows(x: paddle.Tensor, count: int, counter: np.ndarray) -> paddle.Tensor:
    return x.reshape([-1, count * x.shape[1]])


def mean_rows(x: paddle.Tensor, count: int, counter: np.ndarray) -> paddle.Tensor:
    return paddle.add_n(paddle.unbind(x.reshape([-1, count, x.shape[1]]), axis=1)) * (1.0 / count)


def adjust_columns(parts: Sequence[paddle.Tensor | Cut], module: ColumnRules) -> paddle.Tensor | Cut:
    given, rules = parts[0], module.weight
    if isinstance(given, Cut):
        rules = part_of(rules, given.columns or ((given.begin, given.begin + given.tensor.shape[1]),))
    x = own_columns(given) if len(parts) == 1 else paddle.concat([own_columns(part) for part in parts], axis=1)
    factors, shifts, lows, highs = (expand(rule, x.shape) for rule in paddle.split(rules, 4))
    return like(given, paddle.minimum(paddle.maximum(x * factors + shifts, lows), highs))


def take_rows(x: paddle.Tensor, row_ids: paddle.Tensor) -> paddle.Tensor:
    return paddle.gather(x, row_ids)


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
