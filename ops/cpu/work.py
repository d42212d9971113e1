"""What the ops of a tape do: bytes that must move once and arithmetic, of the step that the inputs hold when it is asked for.

Said by `table.py` where an op is recorded, read by the profile of a replay (`tools/bench/step.py`). Bytes are operands, results
and weights, and the keys and values that are seen, each once: what a cache saves or a kernel reads twice is not in them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from ops.cpu.array import Array
from ops.modules import AttentionShape, Experts, LayerCache, Linear
from ops.table import NUM_SEQUENCES, AttentionMetadata, Routing
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat


@dataclass(frozen=True, slots=True)
class Work:
    num_bytes: int
    num_operations: int = 0  # a multiply-add is two
    format: WeightFormat = FLOAT32  # of the weights, or keys and values, that are multiplied


def bytes_of(*operands: Any) -> int:
    """Of Arrays with the rows that they have now, of numpy arrays, and of what holds several; anything else has none."""
    return sum(map(_bytes_of, operands))


def _bytes_of(operand: Any) -> int:
    if isinstance(operand, Array):
        item_bytes = 4 if operand.owner is None else operand.owner.itemsize
        return operand.rows.count * operand.width * item_bytes
    if isinstance(operand, np.ndarray):
        return operand.nbytes
    if isinstance(operand, (tuple, list)):
        return bytes_of(*operand)
    if is_dataclass(operand):
        return bytes_of(*(getattr(operand, field.name) for field in fields(operand)))
    return 0


def gather_work(y: Array) -> Work:
    """The rows that are taken, not their table."""
    return Work(2 * bytes_of(y))


def linear_work(y: Array, x: Array, module: Linear) -> Work:
    num_operations = 2 * y.rows.count * module.num_inputs * module.width
    return Work(bytes_of(y, x, module.weight, module.bias), num_operations, module.format)


def experts_work(y: Array, x: Array, routing: Routing, module: Experts) -> Work:
    """The matrices of the experts that some row has, as the last replay chose them."""
    num_chosen, num_met = routing.ids.numpy().size, len(np.unique(routing.ids.numpy()))
    num_bytes = bytes_of(module.weight.gate_up, module.weight.down) // module.num_experts * num_met
    num_operations = 2 * num_chosen * 3 * module.num_inputs * module.inner
    return Work(bytes_of(y, x, routing) + num_bytes, num_operations, module.gate_up[0].format)


def rotation_work(queries: Array, qkv: Array, cache: LayerCache) -> Work:
    """Queries, keys and values are read, queries and a slot of the cache for each row written."""
    return Work(bytes_of(queries, qkv) + qkv.rows.count * _slot_bytes(cache))


def _slot_bytes(cache: LayerCache) -> int:
    """Of keys [num_blocks, bytes of a block] and values, for one position."""
    return bytes_of(cache.keys, cache.values) // (len(cache.keys) * cache.block_size)


def attention_work(y: Array, queries: Array, inputs: AttentionMetadata, shape: AttentionShape, cache: LayerCache) -> Work:
    """Every sequence's keys and values once, and two products for each query and key that it sees."""
    num_sequences = int(inputs.host_counts[NUM_SEQUENCES])
    starts = np.asarray(inputs.sequence_starts[:num_sequences], np.int64)
    offsets = np.asarray(inputs.sequence_offsets[: num_sequences + 1], np.int64)
    counts = offsets[1:] - offsets[:-1]
    window = shape.sliding_window or 1 << 40
    positions = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    num_seen = int(np.minimum(positions + 1, window).sum())
    num_read = int(np.minimum(starts + counts, window + counts - 1)[counts > 0].sum())
    num_operations = 4 * shape.num_heads * shape.head_dim * num_seen
    format = FLOAT32 if cache.dtype == "float32" else BFLOAT16  # what bytes are widened to
    return Work(bytes_of(y, queries) + num_read * _slot_bytes(cache), num_operations, format)
