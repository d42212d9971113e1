"""Tensors of recurrent layers in a GGUF file, restored to their form in checkpoints. Called by `gguf.py`.

- A_log is stored as -exp(A_log).
- Convolutions are stored without their axis of one channel, and vectors of Mamba-2 with another axis.
- Qwen3.5's value heads are in rows, columns and vectors in another order: the first of each key head, then the second of each,
  and so on. Checkpoints have those of a key head side by side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.recurrence import Recurrence
from engine.checkpoint.model_config import ModelConfig
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.rows import column_groups_of, rows_of

_CONVOLUTION = re.compile(r".+\.(([qkv]_)?conv1d|conv\.conv)\.weight")
_VECTOR = re.compile(r".+\.(D|(mamba|mixer)\.norm\.weight)")
_LINEAR = re.compile(r".+\.linear_attn\.(in_proj_qkv|conv1d|in_proj_z|in_proj_b|in_proj_a|A_log|dt_bias|out_proj)(\.weight)?")
_WITH_KEYS = ("in_proj_qkv", "conv1d")  # queries and keys come first
_BY_HEAD = ("in_proj_b", "in_proj_a", "A_log", "dt_bias")  # one row for each


def restored(tensors: Mapping[str, DecodedTensor], config: ModelConfig) -> dict[str, DecodedTensor]:
    """Return all tensors, by Hugging Face name."""
    sizes = config.recurrence
    assert sizes is not None, "the config has no recurrent layers"
    is_tiled = FAMILIES[config.architecture].has_tiled_heads_in_gguf and sizes.num_key_heads != sizes.num_value_heads
    found = {name: _untransformed(name, tensor, sizes) for name, tensor in tensors.items()}
    return {name: _in_order(name, tensor, sizes) for name, tensor in found.items()} if is_tiled else found


def _untransformed(name: str, tensor: DecodedTensor, sizes: Recurrence) -> DecodedTensor:
    if name.endswith(".A_log"):

        def logarithm() -> np.ndarray:
            found: np.ndarray = np.log(-tensor.read().reshape(shape))
            return found

        count = math.prod(tensor.shape)
        shape = (1, 1, count, 1) if sizes.is_per_channel else (count,)
        return DecodedTensor(shape, logarithm, logarithm, lambda: None, tensor.read_integers)
    if _CONVOLUTION.fullmatch(name):
        return _reshaped(tensor, (math.prod(tensor.shape[:-1]), 1, tensor.shape[-1]))
    return _reshaped(tensor, (math.prod(tensor.shape),)) if _VECTOR.fullmatch(name) else tensor


def _reshaped(tensor: DecodedTensor, shape: tuple[int, ...]) -> DecodedTensor:
    """Return a tensor of floats in another shape."""
    return replace(
        tensor,
        shape=shape,
        read=lambda: tensor.read().reshape(shape),
        read_plain=lambda: tensor.read_plain().reshape(shape),
        read_columns=None,
        read_rows=None,
    )


def _in_order(name: str, tensor: DecodedTensor, sizes: Recurrence) -> DecodedTensor:
    """Return a tensor with the value heads of a key head side by side. One of another size than the heads stays as it is: its
    shape is refused when the model is loaded."""
    match = _LINEAR.fullmatch(name)
    if match is None:
        return tensor
    has_columns = match[1] == "out_proj"
    first = 2 * sizes.keys_width if match[1] in _WITH_KEYS else 0
    width = 1 if match[1] in _BY_HEAD else sizes.value_dim
    if tensor.shape[-1 if has_columns else 0] != first + sizes.num_value_heads * width:
        return tensor
    heads = np.arange(sizes.num_value_heads).reshape(-1, sizes.num_key_heads).T.ravel()
    if has_columns:
        return column_groups_of(tensor, heads, width)
    rows = first + (heads[:, None] * width + np.arange(width)).ravel()
    return rows_of(tensor, np.concatenate([np.arange(first), rows]))
