"""Experts that a checkpoint stores as one tensor for all experts of a layer, as gpt-oss does, split into those of each expert.

    gate_up_proj [experts, in, 2 * inner], down_proj [experts, inner, out]: gate and up in alternating columns
    gate_up_proj_bias [experts, 2 * inner], down_proj_bias [experts, out]
    gate_up_projs.3.weight [2 * inner, in], down_projs.3.weight [out, inner], .bias: the same as linears, as Unsloth writes them
    ..._blocks uint8 [experts, outputs, groups, 16] and ..._scales uint8 [experts, outputs, groups]: the same weights in MXFP4

Called by the loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from engine.errors import CheckpointError
from ops.weight_format import QuantizedWeight, WeightFormat, float32
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.mxfp4 import GROUP_SIZE, MXFP4, NAN, codes_of, scales_of
from workers.weights.formats.rows import no_integers, rows_of
from workers.weights.formats.tensor import Tensor
from workers.weights.safetensors import StoredTensor

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_LINEAR = re.compile(r"(.+\.experts)\.(gate_up|down)_projs\.(\d+)\.(weight|bias)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with separate weights [out, in] and biases of each expert. Raises CheckpointError."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None and (linear := _LINEAR.fullmatch(name)):
            prefix, stem, expert, suffix = linear.groups()
            parts = _PARTS[f"{stem}_proj"]
            for index, part in enumerate(parts):
                found[f"{prefix}.{expert}.{part}.{suffix}"] = rows_of(tensor, slice(index, None, len(parts)))
        elif match is None:
            found[name] = tensor
        elif match[3] != "_scales" or name.replace("_scales", "_blocks") not in tensors:
            found.update(_split(name, match, tensor, tensors))
    return found


def _split(name: str, match: re.Match[str], tensor: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    prefix, stem, kind = match.groups()
    parts = _PARTS[stem]
    if kind in ("_blocks", "_scales"):
        blocks, scales = _packed_pair(f"{prefix}.{stem}", tensors)
    elif len(tensor.shape) != (2 if kind else 3) or tensor.shape[-1] % len(parts):
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected that of all experts of a layer")
    for expert in range(tensor.shape[0]):
        for index, part in enumerate(parts):
            rows = slice(index, None, len(parts))
            if kind in ("_blocks", "_scales"):
                yield f"{prefix}.{expert}.{part}.weight", _packed_weight(blocks, scales, expert, rows)
            else:
                suffix = "bias" if kind else "weight"
                yield f"{prefix}.{expert}.{part}.{suffix}", _float_part(tensor, expert, rows)


def _float_part(tensor: Tensor, expert: int, columns: slice) -> DecodedTensor:
    """Return some columns of one expert, turned to [out, in], or its bias."""

    def read() -> np.ndarray:
        return float32(read_plain())

    def read_plain() -> np.ndarray:
        values: np.ndarray = tensor.read_plain()[expert][..., columns].T
        return values

    shape = (len(range(tensor.shape[-1])[columns]), *tensor.shape[1:-1])
    return DecodedTensor(shape, read, read_plain, lambda: None, partial(no_integers, shape), tensor.is_float)


def _packed_pair(name: str, tensors: Mapping[str, Tensor]) -> tuple[StoredTensor, StoredTensor]:
    """Return blocks and scales of one matrix."""
    blocks, scales = (tensors.get(f"{name}_{part}") for part in ("blocks", "scales"))
    if not (isinstance(blocks, StoredTensor) and isinstance(scales, StoredTensor)):
        raise CheckpointError(f"{name}: MXFP4 needs both {name}_blocks and {name}_scales")
    expected = (*scales.shape, GROUP_SIZE // 2)
    if blocks.dtype != "U8" or scales.dtype not in ("U8", "F8_E8M0") or len(scales.shape) != 3 or blocks.shape != expected:
        raise CheckpointError(
            f"{name}_blocks is {blocks.dtype} {list(blocks.shape)} and {name}_scales {scales.dtype} {list(scales.shape)}; "
            f"expected U8 [experts, outputs, groups, {GROUP_SIZE // 2}] and U8 [experts, outputs, groups]"
        )
    return blocks, scales


def _packed_weight(blocks: StoredTensor, scales: StoredTensor, expert: int, rows: slice) -> DecodedTensor:
    def read_integers(format: WeightFormat) -> QuantizedWeight:
        assert format == MXFP4, f"MXFP4 weights are not {format}"
        codes = codes_of(blocks.read_stored()[expert, rows])
        exponents = scales.read_stored()[expert, rows]
        factors = np.where(exponents == NAN, np.float32(np.nan), scales_of(exponents))
        return QuantizedWeight(MXFP4, codes.reshape(len(codes), -1), factors)

    def read() -> np.ndarray:
        return float32(read_integers(MXFP4))

    shape = (len(range(scales.shape[1])[rows]), scales.shape[2] * GROUP_SIZE)
    return DecodedTensor(shape, read, read, lambda: MXFP4, read_integers)
