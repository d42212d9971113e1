"""Gemma 4 (Google 2026): Llama's decoder with an additional input of each layer, and experts beside an MLP.

A layer's own input of a token is a row of a table plus a projection of the token's embedding. After the MLP it is multiplied by
a gate, projected, normalized and added to the residual.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from ops.modules import Tensor
from ops.table import Inputs, OpTable
from workers.models.llama import Llama, LlamaLayer
from workers.models.mlp import FeedForward, Mixture, Mlp
from workers.models.norms import BlockNorm, normalize
from workers.weights.declaration import Weights


class MlpAndExperts(FeedForward):
    """The sum of an MLP and a mixture of experts, each normalized before and after. The router has a norm of its own."""

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, norm: BlockNorm | None, index: int, weights: Weights, prefix: str
    ) -> None:
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm = norm
        self.mlp = Mlp(config, f"{prefix}.mlp", config.layer_shape(index).intermediate_size, weights)
        self.mlp_end = weights.norm(f"{prefix}.post_feedforward_layernorm_1", width, epsilon)
        self.router_norm = weights.norm(f"{prefix}.router.scale", width, epsilon)
        self.router_factor = width**-0.5
        self.experts_norm = weights.norm(f"{prefix}.pre_feedforward_layernorm_2", width, epsilon)
        self.mixture = Mixture(config, experts, prefix, weights)
        self.experts_end = weights.norm(f"{prefix}.post_feedforward_layernorm_2", width, epsilon)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        by_mlp = ops.rms_norm(self.mlp.forward(ops, step, normalize(ops, h, self.norm)), self.mlp_end)
        scored = ops.scale_and_add(ops.rms_norm(h, self.router_norm), self.router_factor, None)
        by_experts = ops.all_gather(self.mixture.columns(ops, step, ops.rms_norm(h, self.experts_norm), None, scored))
        return ops.scale_and_add(by_mlp, 1.0, ops.rms_norm(by_experts, self.experts_end))


class LayerInput:
    """One layer's table, the projection of the embedding, and the way of their sum into the residual. The sum's factor of
    2^-0.5 is left out: the norm after the last projection removes it."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, dim = config.hidden_size, config.layer_inputs_dim
        self.activation = config.activation
        self.gate = weights.linear([f"{prefix}.per_layer_input_gate"], hidden, [dim], columns=())
        self.outer = weights.linear([f"{prefix}.per_layer_projection"], dim, [hidden], columns=())
        self.end = weights.norm(f"{prefix}.post_per_layer_input_norm", hidden, 2 * config.rms_norm_eps)

    def forward(self, ops: OpTable, residual: Tensor, own: Tensor) -> Tensor:
        gate = ops.activate(ops.linear(residual, self.gate), self.activation)
        return ops.rms_norm(ops.linear(ops.multiply(gate, own), self.outer), self.end)


class Gemma4Layer(LlamaLayer):
    """One decoder layer's weights."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        super().__init__(config, index, weights, prefix)
        self.factor = weights.factor(f"{prefix}.layer_scalar")
        self.own = LayerInput(config, weights, prefix) if config.layer_inputs_dim else None

    def feed_forward(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward | None:
        if config.experts is None:
            return super().feed_forward(config, index, weights, prefix)
        norm, self.inner_norm = self.inner_norm, None  # experts and router read the residual
        return MlpAndExperts(config, config.experts, norm, index, weights, prefix)


class Gemma4(Llama):
    """The whole model."""

    layer_class = Gemma4Layer
    layers: list[Gemma4Layer]  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        dim, hidden, count = config.layer_inputs_dim, config.hidden_size, config.num_layers
        if not dim:
            return
        self.tables = weights.embedding_columns("model.embed_tokens_per_layer", config.vocab_size, dim, count)
        self.projections = weights.linear_outputs("model.per_layer_model_projection", hidden, dim, count)
        # the projection's factor of hidden^-0.5 is in the norm's epsilon
        self.projected = weights.norm("model.per_layer_projection_norm", dim, config.rms_norm_eps * hidden)

    def layer_input(self, ops: OpTable, inputs: Inputs, index: int, embedded: Tensor) -> list[Tensor]:
        if not self.config.layer_inputs_dim:
            return []
        projected = ops.rms_norm(ops.linear(embedded, self.projections[index]), self.projected)
        row = ops.embedding(inputs, self.tables[index])
        return [ops.scale_and_add(row, self.config.layer_inputs_dim**0.5, projected)]

    def end_layer(self, ops: OpTable, index: int, h: Tensor, residual: Tensor, own: list[Tensor]) -> tuple[Tensor, Tensor]:
        layer = self.layers[index]
        if layer.own is not None:
            residual = ops.scale_and_add(h, 1.0, residual)
            h = layer.own.forward(ops, residual, *own)
        return ops.multiply(h, layer.factor), ops.multiply(residual, layer.factor)
