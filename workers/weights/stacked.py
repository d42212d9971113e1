"""Matrices that are stored together: the experts of a layer as one tensor, or gate and up as one. Used by the reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.stacked_floats import StackedFloats
from workers.weights.formats.stacked_modules import StackedModules
from workers.weights.formats.tensor import Tensor
from workers.weights.safetensors import StoredTensor

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|up_proj|down_proj)(?:\.weight)?")
_TURNED = re.compile(r"(multi_modal_projector\.mm_input_projection)_weight")  # Gemma 3: [in, out] in all files
_SHARED = re.compile(r"(.*\.mlp\.shared_experts)\.gate_up_proj\.weight")

Stacked = StoredTensor | StackedFloats | StackedModules


class Matrix(msgspec.Struct, frozen=True):
    """One matrix [out, in]: `tensor`, or rows [begin, end) of it after it is turned."""

    name: str
    tensor: Tensor
    turned_rows: tuple[int, int] | None = None


def matrices(name: str, tensor: Tensor, config: ModelConfig) -> list[Matrix]:
    """Return the matrices of a tensor that has several, or one that is turned; none for other tensors."""
    if isinstance(tensor, StoredTensor) and (match := _TURNED.fullmatch(name)) and len(tensor.shape) == 2:
        return [Matrix(f"{match[1]}.weight", tensor, (0, tensor.shape[1]))]
    if not isinstance(tensor, Stacked):
        return []
    if isinstance(tensor, StoredTensor) and (match := _SHARED.fullmatch(name)) and len(tensor.shape) == 2:
        return list(_halves(match[1], tensor))
    if config.experts is not None and (match := _EXPERTS.fullmatch(name)) and len(tensor.shape) == 3:
        return list(_experts(match[1], match[2], tensor, config, config.experts.intermediate_size))
    return []


def _experts(prefix: str, part: str, tensor: Stacked, config: ModelConfig, inner: int) -> Iterator[Matrix]:
    assert config.experts is not None, f"{prefix} belongs to a model without experts"
    is_gated, width = part == "gate_up_proj", config.experts.latent_size or config.hidden_size
    straight = (width, inner) if part == "down_proj" else (2 * inner if is_gated else inner, width)
    is_turned = FAMILIES[config.architecture].has_turned_experts
    if tensor.shape[1:] != (straight[::-1] if is_turned else straight):
        is_turned = not is_turned
    num_rows, num_outputs = tensor.shape[1], tensor.shape[2 if is_turned else 1]
    parts = {"gate_proj": (0, num_outputs // 2), "up_proj": (num_outputs // 2, num_outputs)}
    for index in range(tensor.shape[0]):
        for name, (begin, end) in parts.items() if is_gated else ((part, (0, num_outputs)),):
            rows = (0, num_rows) if is_turned else (begin, end)
            own = (begin, end) if is_turned else None
            expert = _of_expert(tensor, index, *rows)
            if is_turned and isinstance(expert, DecodedTensor):
                expert = replace(expert, kept=lambda: "inputs come first")
            yield Matrix(f"{prefix}.{index}.{name}.weight", expert, own)


def _of_expert(tensor: Stacked, index: int, begin: int, end: int) -> Tensor:
    """Return rows [begin, end) of one expert."""
    return tensor.at(index).rows(begin, end) if isinstance(tensor, StoredTensor) else tensor.rows(index, begin, end)


def _halves(prefix: str, tensor: StoredTensor) -> Iterator[Matrix]:
    half = tensor.shape[0] // 2
    yield Matrix(f"{prefix}.gate_proj.weight", tensor.rows(0, half))
    yield Matrix(f"{prefix}.up_proj.weight", tensor.rows(half, tensor.shape[0]))
