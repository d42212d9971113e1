"""Work of a tape's ops in the current step: bytes that must move once, and arithmetic.

`table.py` states it where an op is recorded; the profile of a replay reads it (`tools/bench/step.py`). Bytes are operands,
results, weights, and visible keys and values, each counted once: savings by a cache and repeated reads do not count.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ops.cpu.array import Array
from ops.modules import AttentionShape, Convolution, Experts, HeadLinear, LatentShape, LayerCache, Linear
from ops.table import HAS_BOUNDS, NUM_SEQUENCES, AttentionMetadata, Routing
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat


class Work(msgspec.Struct, frozen=True):
    num_bytes: int
    num_operations: int = 0  # a multiply-add is two
    format: WeightFormat = FLOAT32  # type of the weights, or keys and values


def bytes_of(*operands: Any) -> int:
    """Return the bytes of Arrays with their present rows, of numpy arrays, and of containers of these; anything else has
    none."""
    return sum(map(_bytes_of, operands))


def _bytes_of(operand: Any) -> int:
    if isinstance(operand, Array):
        item_bytes = 4 if operand.owner is None else operand.owner.itemsize
        return operand.rows.count * operand.width * item_bytes
    if isinstance(operand, np.ndarray):
        return operand.nbytes
    if isinstance(operand, (tuple, list)):
        return bytes_of(*operand)
    if isinstance(operand, msgspec.Struct):
        return bytes_of(*msgspec.structs.astuple(operand))
    return 0


def gather_work(y: Array) -> Work:
    """Return the work of the gathered rows, without their table."""
    return Work(2 * bytes_of(y))


def linear_work(y: Array, x: Array, module: Linear) -> Work:
    num_operations = 2 * y.rows.count * module.num_inputs * module.width
    return Work(bytes_of(y, x, module.weight, module.bias), num_operations, module.format)


def adapt_work(inputs: AttentionMetadata, y: Array, x: Array, module: Linear) -> Work:
    """Return the work of the adapters that some row of the step has."""
    adapters = module.adapters
    assert adapters is not None
    slots, counts = np.unique(np.asarray(inputs.adapter_slots)[: y.rows.count], return_counts=True)
    num_products = num_bytes = 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        for part in adapters.parts if slot >= 0 else ():
            products = int(adapters.ranks[slot, part.index]) * (module.num_inputs + part.num_outputs)
            num_products += count * products
            num_bytes += 4 * (products + count * (module.num_inputs + 2 * part.num_outputs))
    return Work(num_bytes, 2 * num_products)


def experts_work(y: Array, x: Array, routing: Routing, module: Experts) -> Work:
    """Return the work of the experts with rows in the last replay."""
    num_chosen, num_met = routing.ids.numpy().size, len(np.unique(routing.ids.numpy()))
    num_bytes = bytes_of(module.weight.gate_up, module.weight.down) // module.num_experts * num_met
    num_operations = 2 * num_chosen * (3 if module.is_gated else 2) * module.num_inputs * module.inner
    return Work(bytes_of(y, x, routing) + num_bytes, num_operations, module.gate_up[0].format)


def head_linear_work(y: Array, module: HeadLinear) -> Work:
    num_heads = len(module.heads)
    num_inputs, weights = y.rows.count * num_heads * module.num_inputs, bytes_of(module.weight) // module.num_heads * num_heads
    return Work(bytes_of(y) + weights + 4 * num_inputs, 2 * num_inputs * module.num_outputs, module.format)


def rotation_work(queries: Array, read: Array | tuple[Array, ...], cache: LayerCache) -> Work:
    """Return the work: reads queries, keys and values, writes queries and a cache slot for each row."""
    return Work(bytes_of(queries, read) + queries.rows.count * _slot_bytes(cache))


def _slot_bytes(cache: LayerCache) -> int:
    """Return the bytes of keys [num_blocks, bytes of a block] and values for one position."""
    return bytes_of(cache.keys, cache.values) // (len(cache.keys) * cache.block_size)


def attention_work(y: Array, queries: Array, inputs: AttentionMetadata, shape: AttentionShape, cache: LayerCache) -> Work:
    """Return the work: every sequence's keys and values once, and two products for each query and visible key."""
    num_seen, num_read = _seen_and_read(inputs, shape.sliding_window, shape.has_bounds)
    num_operations = 4 * shape.num_heads * shape.head_dim * num_seen
    return Work(bytes_of(y, queries) + num_read * _slot_bytes(cache), num_operations, _multiplied(cache))


def latent_attention_work(
    operands: tuple[Array, ...], inputs: AttentionMetadata, shape: LatentShape, cache: LayerCache
) -> Work:
    """Return the work of latent attention; latents are keys and values and read once."""
    num_seen, num_read = _seen_and_read(inputs, 0)
    num_operations = 2 * shape.heads.count * (2 * shape.latent_dim + shape.rotary_dim) * num_seen
    return Work(bytes_of(operands) + num_read * _slot_bytes(cache), num_operations, _multiplied(cache))


def recurrence_work(
    operands: tuple[Array, ...], inputs: AttentionMetadata, heads: int, key_dim: int, value_dim: int, num_products: int
) -> Work:
    """Return the work of a recurrence: the matrix of each sequence is read and written once, and each row updates it and
    multiplies it with `num_products` vectors."""
    numbers = heads * key_dim * value_dim
    num_sequences = int(inputs.host_counts[NUM_SEQUENCES])
    return Work(bytes_of(operands) + 8 * num_sequences * numbers, (3 + 2 * num_products) * operands[0].rows.count * numbers)


def convolution_work(y: Array, inputs: AttentionMetadata, channels: int, module: Convolution) -> Work:
    """Return the work of a convolution; each sequence's window is read and written once."""
    windows = 8 * int(inputs.host_counts[NUM_SEQUENCES]) * (module.kernel - 1) * channels
    num_operations = 2 * y.rows.count * module.kernel * channels
    return Work(4 * 2 * y.rows.count * channels + windows + bytes_of(module.weight), num_operations)


def _multiplied(cache: LayerCache) -> WeightFormat:
    return FLOAT32 if cache.dtype == "float32" else BFLOAT16  # type to which bytes are widened


def _seen_and_read(inputs: AttentionMetadata, sliding_window: int, has_bounds: bool = True) -> tuple[int, int]:
    """Return the number of pairs of a query and a visible key, and of keys visible to any query of their sequence."""
    num_sequences = int(inputs.host_counts[NUM_SEQUENCES])
    starts = np.asarray(inputs.sequence_starts[:num_sequences], np.int64)
    offsets = np.asarray(inputs.sequence_offsets[: num_sequences + 1], np.int64)
    counts = offsets[1:] - offsets[:-1]
    window = sliding_window or 1 << 40
    positions = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    first, last = np.zeros_like(positions), positions
    if has_bounds and inputs.host_counts[HAS_BOUNDS]:
        first, last = (np.asarray(keys[: len(positions)], np.int64) for keys in (inputs.first_keys, inputs.last_keys))
    num_seen = int((last + 1 - np.maximum(first, positions + 1 - window)).sum())
    num_read = int(np.minimum(starts + counts, window + counts - 1)[counts > 0].sum())
    return num_seen, num_read
