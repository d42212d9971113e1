"""The part of a layer after attention: an MLP, or a mixture of experts. Used by the models."""

from __future__ import annotations

from typing import Any, Protocol

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from ops.modules import Factors, GateClamp, Linear, RoutingRule, Tensor
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
        if "gate_up_proj" in FAMILIES[config.architecture].fused_names:
            columns = weights.share.columns((inner, inner))
            self.gate_up = weights.linear([f"{prefix}.gate_up_proj"], hidden, [2 * inner], config.has_mlp_bias, columns)
        else:
            names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
            self.gate_up = weights.linear(names, hidden, [inner, inner], config.has_mlp_bias)
        self.down = weights.linear([f"{prefix}.down_proj"], inner, [hidden], config.has_mlp_bias)
        self.factors: Factors | None = None
        if config.multipliers.mlp_gate != 1.0:
            spans = (inner, config.multipliers.mlp_gate), (inner, 1.0)
            self.factors = weights.column_factors(f"{prefix}.factors", spans)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.columns(ops, step, h))

    def columns(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        """Return the columns of the result that this rank computes."""
        gate_up = linear(ops, step, h, self.gate_up)
        if self.factors is not None:
            gate_up = ops.adjust_columns([gate_up], self.factors)
        h = ops.all_gather(ops.activate_and_multiply(gate_up, self.activation))
        return linear(ops, step, h, self.down)


class PlainMlp:
    """outer(activation(inner)), of all rows alike."""

    def __init__(self, config: ModelConfig, prefix: str, names: tuple[str, ...], width: int, weights: Weights) -> None:
        hidden = config.hidden_size
        inner, outer = (f"{prefix}.{name}" for name in names)
        self.activation = config.activation
        self.inner = weights.linear([inner], hidden, [width], config.has_mlp_bias)
        self.outer = weights.linear([outer], width, [hidden], config.has_mlp_bias)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.columns(ops, step, h))

    def columns(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        """Return the columns of the result that this rank computes."""
        h = ops.all_gather(ops.activate(linear(ops, step, h, self.inner), self.activation))
        return linear(ops, step, h, self.outer)


class Mixture:
    """Mixture of experts: an MLP of a few out of many experts per row, and a shared MLP if the model has one."""

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
        """With a `set`, experts only for the rows of that set, stored from number `first` on. `is_local`: not divided among
        ranks."""
        rule = RoutingRule(
            experts.num_chosen,
            experts.scoring,
            experts.is_normalized,
            experts.added_to_sum,
            experts.smallest_sum,
            experts.factor,
            experts.num_groups,
            experts.num_chosen_groups,
            experts.num_best,
        )
        prefix, correction = f"{layer}.mlp", f"{layer}.{experts.correction}" if experts.correction else ""
        self.activation = config.activation
        self.router = weights.router(
            f"{prefix}.gate",
            config.hidden_size,
            experts.num_experts,
            rule,
            correction,
            experts.correction_shape,
            set,
            experts.has_biases,
            f"{layer}.{experts.scales}" if experts.scales else "",
        )
        plain = FAMILIES[config.architecture].plain_mlp_names
        hidden, width = config.hidden_size, experts.latent_size or config.hidden_size
        self.latent: tuple[Linear, Linear] | None = None
        if experts.latent_size:
            self.latent = (
                weights.linear([f"{prefix}.fc1_latent_proj"], hidden, [width], config.has_mlp_bias),
                weights.linear([f"{prefix}.fc2_latent_proj"], width, [hidden], config.has_mlp_bias),
            )
        clamp = GateClamp(experts.gate_alpha, experts.gate_limit) if experts.gate_limit else None
        self.experts = weights.experts(
            f"{prefix}.experts",
            experts.num_experts,
            width,
            experts.intermediate_size,
            first,
            is_local,
            experts.has_biases,
            clamp,
            is_gated=not plain,
        )
        self.shared: Mlp | PlainMlp | None = None
        if experts.shared_intermediate_size:
            self.shared = _mlp(config, f"{prefix}.shared_experts", experts.shared_intermediate_size, weights)
        self.shared_gate: Linear | None = None
        if experts.has_shared_gate:
            self.shared_gate = weights.linear([f"{prefix}.shared_expert_gate"], config.hidden_size, [1], columns=())
        self.has_weighted_inputs = experts.has_weighted_inputs

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.columns(ops, step, h, None))

    def columns(self, ops: OpTable, step: Any, h: Tensor, shared: Tensor | None, scored: Tensor | None = None) -> Tensor:
        """Return this rank's columns of the result, plus `shared`; all columns if experts have latents. `scored`: the router's
        input, `h` by default."""
        if self.shared is not None:  # has the columns of the same rank
            is_cut = self.experts.is_cut and self.latent is None
            shared = self.shared.columns(ops, step, h) if is_cut else self.shared.forward(ops, step, h)
        if self.shared_gate is not None:
            shared = ops.multiply(shared, ops.activate(ops.linear(h, self.shared_gate), "sigmoid"))
        routing = ops.route(step, h if scored is None else scored, self.router)
        if self.latent is not None:
            shared = None if shared is None else ops.scale_and_add(shared, 1.0, None)  # gathers follow, which overwrite it
            into, out_of = self.latent
            x = ops.all_gather(linear(ops, step, h, into))
            x = ops.all_gather(ops.experts(x, routing, self.experts, self.activation, None))
            return ops.scale_and_add(ops.all_gather(linear(ops, step, x, out_of)), 1.0, shared)
        if not self.has_weighted_inputs:
            return ops.experts(h, routing, self.experts, self.activation, shared)
        for index in range(self.router.rule.num_chosen):  # each has another input
            choice, factors = ops.choose(routing, index)
            shared = ops.experts(ops.multiply(h, factors), choice, self.experts, self.activation, shared)
        return shared


def feed_forward(config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward:
    """Declare the feed-forward part of layer `index` of the trunk, stored under `prefix`. MTP layers have separate experts on
    every rank, because replicas that share the trunk's experts draft independently."""
    experts = config.experts
    if experts is not None and index in experts.sparse_layers:
        return Mixture(config, experts, prefix, weights, is_local=prefix != f"model.layers.{index}")
    name = FAMILIES[config.architecture].mlp_name
    return _mlp(config, f"{prefix}.{name}", config.layer_shape(index).intermediate_size, weights)


def _mlp(config: ModelConfig, prefix: str, width: int, weights: Weights) -> Mlp | PlainMlp:
    """Declare an MLP of the family's kind."""
    names = FAMILIES[config.architecture].plain_mlp_names
    return PlainMlp(config, prefix, names, width, weights) if names else Mlp(config, prefix, width, weights)
