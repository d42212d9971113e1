"""Norms of a decoder layer: RMSNorms, or LayerNorms in some families. Used by the models."""

from __future__ import annotations

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from ops.modules import LayerNorm, Norm, Tensor
from ops.table import OpTable
from workers.weights.declaration import Weights

BlockNorm = Norm | LayerNorm


def declare_norm(config: ModelConfig, weights: Weights, name: str) -> BlockNorm:
    """Declare a norm of whole rows, of the family's kind."""
    kind, width, epsilon = FAMILIES[config.architecture].norm_kind, config.hidden_size, config.rms_norm_eps
    if kind == "rms":
        return weights.norm(name, width, epsilon)
    return weights.layer_norm(name, width, epsilon, has_bias=kind == "layer")


def normalize(ops: OpTable, h: Tensor, norm: BlockNorm | None) -> Tensor:
    """Return norm(h); without a norm h itself."""
    if norm is None:
        return h
    return ops.rms_norm(h, norm) if isinstance(norm, Norm) else ops.layer_norm(h, norm)


def add_norm(ops: OpTable, h: Tensor, residual: Tensor, norm: BlockNorm | None) -> tuple[Tensor, Tensor]:
    """Return norm(h + residual) and h + residual; without a norm the sum, twice."""
    if norm is None:
        total = ops.scale_and_add(h, 1.0, residual)
        return total, total
    return ops.add_rms_norm(h, residual, norm) if isinstance(norm, Norm) else ops.add_layer_norm(h, residual, norm)


class BranchEnd:
    """Norm and factor of what attention, or the MLP, adds to the residual."""

    def __init__(self, norm: BlockNorm | None, factor: float) -> None:
        self.norm = norm
        self.factor = factor

    def apply(self, ops: OpTable, h: Tensor) -> Tensor:
        h = normalize(ops, h, self.norm)
        return h if self.factor == 1.0 else ops.scale_and_add(h, self.factor, None)
