"""Projections that are stored as one tensor and split by rows: queries and their gates, and those of recurrent layers.

    self_attn.q_proj          of each head the query, then the gate
    linear_attn.in_proj_qkvz  of each key head the query, the key, its value heads, their gates
    linear_attn.in_proj_ba    of each key head the rates of its value heads, then their decays
    mamba.in_proj, mixer.in_proj
                              gates, inputs of the convolution, then the time step of each head, which becomes dt_proj

Called by the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from workers.weights.formats.rows import Rows, rows_of
from workers.weights.formats.tensor import Tensor

_JOINED = re.compile(r"(.+\.(?:self_attn|linear_attn))\.(q_proj|in_proj_qkvz|in_proj_ba)\.(weight|bias)")
_MAMBA = re.compile(r"(.+\.(?:mamba|mixer))\.(in_proj)\.(weight|bias)")


def split_projections(tensors: Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    """Return `tensors` with separate queries and gates, and the projections of recurrent layers under Qwen3.5's names. Raises
    CheckpointError."""
    has_mamba = config.recurrence is not None and config.recurrence.mamba is not None
    if not has_mamba and not FAMILIES[config.architecture].has_query_gate:
        return tensors
    pattern = _MAMBA if has_mamba else _JOINED
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        for part, rows in _parts(match[2], name, tensor.shape[0], config):
            found[f"{match[1]}.{part}.{match[3]}"] = rows_of(tensor, rows)
    return found


def _parts(kind: str, name: str, num_rows: int, config: ModelConfig) -> Iterator[tuple[str, Rows]]:
    """Yield the name and the rows of each projection."""
    if kind == "q_proj":
        queries, gates = _columns(name, num_rows, config.num_attention_heads, (config.head_dim, config.head_dim))
        yield "q_proj", queries
        yield "gate_proj", gates
        return
    sizes = config.recurrence
    if sizes is None:
        raise CheckpointError(f"{name} belongs to a recurrent layer, but config.json has none")
    if kind == "in_proj":
        num_steps = sizes.num_value_heads
        yield "in_proj", slice(0, num_rows - num_steps)
        yield "dt_proj", slice(num_rows - num_steps, num_rows)
        return
    shared = sizes.num_value_heads // sizes.num_key_heads
    if kind == "in_proj_ba":
        rates, decays = _columns(name, num_rows, sizes.num_key_heads, (shared, shared))
        yield "in_proj_b", rates
        yield "in_proj_a", decays
        return
    width = shared * sizes.value_dim
    parts = _columns(name, num_rows, sizes.num_key_heads, (sizes.key_dim, sizes.key_dim, width, width))
    yield "in_proj_qkv", np.concatenate(parts[:3])
    yield "in_proj_z", parts[3]


def _columns(name: str, num_rows: int, count: int, widths: Sequence[int]) -> list[np.ndarray]:
    """Return the rows of each part of `count` runs of rows that consist of parts with these widths."""
    if num_rows != count * sum(widths):
        raise CheckpointError(f"{name} has {num_rows} rows, expected {count * sum(widths)}")
    runs = np.arange(num_rows).reshape(count, -1)
    ends = np.cumsum(widths).tolist()
    return [runs[:, end - width : end].ravel() for width, end in zip(widths, ends, strict=True)]
