"""The part of a layer behind attention: an MLP, or a mixture of experts. Used by the models."""

from __future__ import annotations

from typing import Any, Protocol

from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from ops.modules import RoutingRule, Tensor
from ops.table import OpTable
from workers.models.adapted import linear
from workers.weights.declaration import Weights


class FeedForward(Protocol):
    """The part of a layer that its rows go through after attention."""

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor: ...


class Mlp:
    """down(activation(gate) * up), of all rows alike."""

    def __init__(self, config: ModelConfig, prefix: str, inner: int, weights: Weights) -> None:
        hidden = config.hidden_size
        self.activation = config.activation
        self.gate_up = weights.linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], hidden, [inner, inner], config.has_mlp_bias)
        self.down = weights.linear([f"{prefix}.down_proj"], inner, [hidden], config.has_mlp_bias)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.columns(ops, step, h))

    def columns(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        """Those of the result that this rank computes."""
        gate_up = linear(ops, step, h, self.gate_up)
        h = ops.all_gather(ops.activate_and_multiply(gate_up, self.activation))
        return linear(ops, step, h, self.down)


class Mixture:
    """The same, by a few of many experts for each row, and by an MLP for all where the model has that."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        layer: str,
        weights: Weights,
        *,
        set: int | None = None,
        first: int = 0,
        is_local: bool = False,
    ) -> None:
        """With a `set` it is for those rows alone, and its experts are stored from number `first` on. `is_local`: ranks do not
        share them out."""
        rule = RoutingRule(
            experts.num_chosen,
            experts.scoring,
            experts.is_normalized,
            experts.added_to_sum,
            experts.smallest_sum,
            experts.factor,
            experts.num_groups,
            experts.num_chosen_groups,
        )
        prefix, correction = f"{layer}.mlp", f"{layer}.{experts.correction}" if experts.correction else ""
        self.activation = config.activation
        self.router = weights.router(
            f"{prefix}.gate", config.hidden_size, experts.num_experts, rule, correction, experts.correction_shape, set
        )
        self.experts = weights.experts(
            f"{prefix}.experts", experts.num_experts, config.hidden_size, experts.intermediate_size, first, is_local
        )
        self.shared: Mlp | None = None
        if experts.shared_intermediate_size:
            self.shared = Mlp(config, f"{prefix}.shared_experts", experts.shared_intermediate_size, weights)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.columns(ops, step, h, None))

    def columns(self, ops: OpTable, step: Any, h: Tensor, shared: Tensor | None) -> Tensor:
        """Return this rank's columns of the result, and `shared`, which is added to it."""
        if self.shared is not None:  # added to columns of the same rank
            shared = self.shared.columns(ops, step, h) if self.experts.is_cut else self.shared.forward(ops, step, h)
        return ops.experts(h, ops.route(step, h, self.router), self.experts, self.activation, shared)


def feed_forward(config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward:
    """Declare that of layer `index` of the trunk, stored under `prefix`. Layers that are none of the trunk's have experts of
    their own in every rank: replicas that share those of the trunk draft each for itself."""
    experts = config.experts
    if experts is not None and index in experts.sparse_layers:
        return Mixture(config, experts, prefix, weights, is_local=prefix != f"model.layers.{index}")
    return Mlp(config, f"{prefix}.mlp", config.intermediate_size, weights)
