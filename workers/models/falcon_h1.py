"""Falcon-H1 (TII 2025): Llama's decoder with Mamba-2 beside the attention of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from ops.modules import RecurrentCache, Tensor
from ops.table import Inputs, OpTable
from workers.models.llama import Llama, LlamaLayer
from workers.models.mamba2 import MambaMixer
from workers.weights.declaration import Weights


class ParallelLayer(LlamaLayer):
    """Attention and Mamba-2 read the same rows, and both are added to the residual."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        super().__init__(config, index, weights, prefix)
        self.mixer = MambaMixer(config, weights, f"{prefix}.mamba")
        self.multipliers = config.multipliers

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: RecurrentCache) -> tuple[Tensor, ...]:  # type: ignore[override]
        factor = self.multipliers.attention_input
        scaled = h if factor == 1.0 else ops.scale_and_add(h, factor, None)
        return *super().store(ops, inputs, scaled, angles, cache.layer), *self.mixer.store(ops, inputs, h, cache)

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: RecurrentCache) -> Tensor:  # type: ignore[override]
        queries, x, projected = rows
        mixed = self.mixer.attend(ops, step, x, projected)
        mixed = ops.scale_and_add(mixed, self.mixer.options.output_factor, None)  # a copy: gathers follow, which overwrite it
        return ops.scale_and_add(super().attend(ops, step, [queries], cache.layer), self.multipliers.attention_output, mixed)


class FalconH1(Llama):
    """The whole model."""

    recurrent_class = ParallelLayer
