"""Nemotron-H (NVIDIA 2025): a decoder whose layers have one part each: Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from ops.modules import LayerCache, Tensor
from ops.table import Inputs, OpTable
from workers.models.llama import LlamaLayer
from workers.models.mamba2 import Mamba2
from workers.models.mlp import feed_forward
from workers.models.norms import declare_norm
from workers.weights.declaration import Weights


class AttentionLayer(LlamaLayer):
    """Attention alone."""

    def feed_forward(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        return None


class MlpLayer:
    """An MLP, or experts, alone; nothing is kept of a sequence."""

    mlp = None
    inner_norm = None

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        name = FAMILIES[config.architecture].norm_names.input
        self.input_norm = declare_norm(config, weights, f"{prefix}.{name}")
        self.branch = feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: LayerCache) -> tuple[Tensor, ...]:
        return (h,)

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: LayerCache) -> Tensor:
        return self.branch.forward(ops, step, rows[0])


class NemotronH(Mamba2):
    """The whole model."""

    layer_class = AttentionLayer
    mlp_class = MlpLayer
