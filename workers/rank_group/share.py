"""A rank's share of a model: whole heads, and whole panels of a linear's outputs. Pure; used by the models when they declare
their weights.

Nothing is split along inputs or summed across ranks, so each number is computed by the same operations as on a single rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ops.modules import AttentionShape, Columns, HeadRange, LatentShape

PANEL = 16  # the most outputs that a weight layout interleaves
MIN_PANELS = 2  # per rank: smaller linears run whole on each, which is faster than waiting for the others

Shape = TypeVar("Shape", AttentionShape, LatentShape)


class TensorShare(msgspec.Struct, frozen=True):
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1
    shares_experts: bool = False  # experts are divided whole among all ranks of the rank group, not split

    def heads(self, shape: Shape) -> Shape:
        """Return the rank's query heads and their KV heads: with fewer KV heads than ranks, several ranks have the same one."""
        if self.size == 1:
            return shape
        count, kv_count = shape.num_heads // self.size, max(1, shape.num_kv_heads // self.size)
        assert count * self.size == shape.num_heads, f"{shape.num_heads} heads on {self.size} ranks"
        first_kv = self.rank * shape.num_kv_heads // self.size
        return msgspec.structs.replace(shape, own=HeadRange(self.rank * count, count, first_kv, kv_count))

    def recurrent_heads(self, num_heads: int, num_groups: int) -> HeadRange | None:
        """Return the rank's heads of a recurrent layer, and the groups (keys) that neighbouring heads share; None: all."""
        if self.size == 1:
            return None
        count = num_heads // self.size
        assert count * self.size == num_heads, f"{num_heads} heads on {self.size} ranks"
        first, shared = self.rank * count, num_heads // num_groups
        first_group = first // shared
        return HeadRange(first, count, first_group, (first + count - 1) // shared + 1 - first_group)

    def columns(self, num_outputs: Sequence[int]) -> Columns:
        """Return the same part of each run of outputs; none: all, because there are too few to split."""
        if self.size == 1 or min(num_outputs) < MIN_PANELS * self.size * PANEL:
            return ()
        ranges, first = [], 0
        for count in num_outputs:
            num_panels = -(-count // PANEL)
            begin, end = (num_panels * rank // self.size * PANEL for rank in (self.rank, self.rank + 1))
            ranges.append((first + begin, first + min(end, count)))
            first += count
        return tuple(ranges)

    def expert_columns(self, gate_up_outputs: Sequence[int], hidden: int) -> tuple[Columns, Columns]:
        """Return the columns of an expert's gate and up, and of its down: split in both, or whole in both."""
        gate_up, down = self.columns(gate_up_outputs), self.columns((hidden,))
        return (gate_up, down) if gate_up and down and not self.shares_experts else ((), ())


def query_columns(shape: AttentionShape | LatentShape) -> Columns:
    """Return the columns of queries; none: all."""
    if shape.own is None:
        return ()
    return ((shape.own.first * shape.head_dim, (shape.own.first + shape.own.count) * shape.head_dim),)


def head_columns(shape: AttentionShape) -> Columns:
    """Return the columns of queries, and of keys and values if it has them, one after another; none: all."""
    if shape.own is None or not shape.has_keys:
        return query_columns(shape)
    own, dim = shape.own, shape.head_dim
    keys_at, values_at = shape.queries_width, shape.queries_width + shape.keys_width
    ranges = ((0, own.first, own.count), (keys_at, own.first_kv, own.kv_count), (values_at, own.first_kv, own.kv_count))
    return tuple((at + first * dim, at + (first + count) * dim) for at, first, count in ranges)
