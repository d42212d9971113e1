"""Projections that a checkpoint stores as one matrix and the models compute apart, by rows. Pure.

    self_attn.q_proj          of each head the query, then the gate
    linear_attn.in_proj_qkvz  of each key head the query, the key, its value heads, their gates
    linear_attn.in_proj_ba    of each key head the rates of its value heads, then their decays
    mamba.in_proj, mixer.in_proj
                              gates, inputs of the convolution, then the time step of each head

Used for weights (`workers/weights/formats/joined_projections.py`) and for adapters of these.
"""

from __future__ import annotations

import msgspec

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig


class JoinedProjection(msgspec.Struct, frozen=True):
    """`count` runs of rows, each of several pieces. A part consists of the pieces of its number, in the order of `widths`."""

    module: str  # "self_attn"
    name: str
    part_names: tuple[str, ...]
    count: int
    widths: tuple[int, ...]  # rows of the pieces
    part_numbers: tuple[int, ...]  # of the pieces

    @property
    def num_rows(self) -> int:
        return self.count * sum(self.widths)


def joined_projections(config: ModelConfig) -> tuple[JoinedProjection, ...]:
    """Return those that checkpoints of the model may have."""
    found, sizes, family = [], config.recurrence, FAMILIES[config.architecture]
    if family.has_query_gate:
        both = config.head_dim, config.head_dim
        names = "q_proj", "gate_proj"
        found.append(JoinedProjection("self_attn", "q_proj", names, config.num_attention_heads, both, (0, 1)))
    if sizes is None:
        return tuple(found)
    if sizes.kind == "state spaces":
        pieces = sizes.values_width + sizes.channels, sizes.num_value_heads
        names = "in_proj", "dt_proj"
        return (*found, *(JoinedProjection(each, "in_proj", names, 1, pieces, (0, 1)) for each in ("mamba", "mixer")))
    if family.has_joined_inputs:
        shared, count = sizes.num_value_heads // sizes.num_key_heads, sizes.num_key_heads
        width = shared * sizes.value_dim
        widths = sizes.key_dim, sizes.key_dim, width, width
        names = "in_proj_qkv", "in_proj_z"
        found.append(JoinedProjection("linear_attn", "in_proj_qkvz", names, count, widths, (0, 0, 0, 1)))
        names = "in_proj_b", "in_proj_a"
        found.append(JoinedProjection("linear_attn", "in_proj_ba", names, count, (shared, shared), (0, 1)))
    return tuple(found)
