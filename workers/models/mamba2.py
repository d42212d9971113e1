"""Mamba-2 (Dao and Gu 2024), alone or in place of attention in Llama's decoder (Granite 4 H, Bamba)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.recurrence import Mamba
from engine.checkpoint.model_config import ModelConfig
from ops.modules import Columns, Factors, GatedNorm, HeadRange, RecurrentCache, StateSpaces, Tensor
from ops.table import Inputs, OpTable
from workers.models.adapted import linear
from workers.models.llama import EndedFeedForward, Llama
from workers.models.mlp import FeedForward, feed_forward
from workers.models.norms import BlockNorm, BranchEnd, declare_norm
from workers.weights.declaration import Weights


class MambaMixer:
    """A projection to gates, x, B, C and a time step of each head; a convolution of x, B and C; the recurrence; its norm and
    gate; and a projection."""

    def __init__(self, config: ModelConfig, weights: Weights, module: str) -> None:
        sizes, hidden = config.recurrence, config.hidden_size
        assert sizes is not None, "the config has no recurrent layers"
        assert sizes.mamba is not None, "the config has no state spaces"
        self.options: Mamba = sizes.mamba
        width, heads = sizes.values_width, sizes.num_value_heads
        self.rule = weights.state_space(module, sizes, self.options.least_step, self.options.most_step)
        group = width // sizes.num_key_heads
        is_divided = self.rule.own is not None and (self.rule.own.count * sizes.value_dim) % group != 0
        self.is_gathered = is_divided and self.options.norm != "none"  # a group of the norm has heads of several ranks
        own = _columns(self.rule, has_all_gates=self.is_gathered and self.options.norm == "before gate")
        has_bias = self.options.has_input_bias
        self.projection = weights.linear([f"{module}.in_proj"], hidden, [width + sizes.channels], has_bias, own)
        self.factors: Factors | None = None
        if self.options.factors:
            widths = (width, width, sizes.keys_width, sizes.keys_width)
            spans = list(zip(widths, self.options.factors, strict=False))
            self.factors = weights.column_factors(f"{module}.factors", spans)
        self.steps = weights.exact_linear([f"{module}.dt_proj"], hidden, [heads], has_bias)
        is_silu = self.options.activation == "silu"
        inputs = tuple((begin - width, end - width) for begin, end in own[1:])
        self.convolution = weights.convolution(f"{module}.conv1d", sizes, inputs, activation="silu" if is_silu else "")
        self.convolution.first = width
        self.gate: GatedNorm | None = None  # if it is apart from the norm
        self.norm: GatedNorm | None = None
        if self.options.norm == "none" or (self.is_gathered and self.options.norm == "after gate"):
            self.gate = GatedNorm(f"{module}.gate", width, sizes.value_dim, 0.0, has_norm=False)
        if self.options.norm != "none":
            is_gated_first = self.options.norm == "after gate"
            self.norm = weights.gated_norm(
                f"{module}.norm", width, group, config.rms_norm_eps, is_shared=False, is_gated_first=is_gated_first
            )
        self.output = weights.linear([f"{module}.out_proj"], width, [hidden], self.options.has_output_bias)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, cache: RecurrentCache) -> tuple[Tensor, Tensor]:
        """Return results of the recurrence, and a tensor that begins with the gates."""
        states, options = (cache.places, cache.states), self.options
        if options.input_factor != 1.0:
            h = ops.scale_and_add(h, options.input_factor, None)
        projected, steps = linear(ops, inputs, h, self.projection), linear(ops, inputs, h, self.steps)
        if self.factors is not None:
            projected = ops.adjust_columns([projected], self.factors)
            steps = ops.scale_and_add(steps, options.factors[-1], None)
        x = ops.convolve(inputs, projected, self.convolution, *states)
        if options.activation != "silu":
            x = ops.activate(x, options.activation)
        return ops.state_space(inputs, x, steps, self.rule, *states), projected

    def attend(self, ops: OpTable, step: Any, x: Tensor, projected: Tensor) -> Tensor:
        """Return the results for the rows of `step`, from those of `store`."""
        if self.gate is not None:
            x = ops.gated_norm(x, projected, self.gate)
        if self.is_gathered:
            x = ops.all_gather(x)
        if self.norm is not None:
            x = ops.gated_norm(x, None if self.gate is not None else projected, self.norm)
        return ops.all_gather(linear(ops, step, ops.all_gather(x), self.output))


def _columns(rule: StateSpaces, *, has_all_gates: bool) -> Columns:
    """Return the columns of gates, x, B and C that this rank computes; none: all."""
    if rule.own is None:
        return ()
    own: HeadRange = rule.own
    width, keys = rule.num_heads * rule.head_dim, rule.num_groups * rule.state_dim
    heads = own.first * rule.head_dim, own.count * rule.head_dim
    groups = own.first_kv * rule.state_dim, own.kv_count * rule.state_dim
    spans = ((0, *((0, width) if has_all_gates else heads)), (width, *heads), (2 * width, *groups), (2 * width + keys, *groups))
    return tuple((at + first, at + first + count) for at, first, count in spans)


class MambaLayer:
    """A layer with Mamba-2 in place of attention; in families without an inner norm also in place of the MLP."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        names, factor = FAMILIES[config.architecture].norm_names, config.multipliers.residual
        self.input_norm = declare_norm(config, weights, f"{prefix}.{names.input}")
        self.mixer = MambaMixer(config, weights, f"{prefix}.mamba")
        self.attended = BranchEnd(None, factor)
        self.inner_norm: BlockNorm | None = None
        self.mlp: FeedForward | None = None
        if names.inner:
            self.inner_norm = declare_norm(config, weights, f"{prefix}.{names.inner}")
            self.mlp = feed_forward(config, index, weights, prefix)
            if factor != 1.0:
                self.mlp = EndedFeedForward(self.mlp, self.attended)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: RecurrentCache) -> tuple[Tensor, ...]:
        return self.mixer.store(ops, inputs, h, cache)

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: RecurrentCache) -> Tensor:
        return self.attended.apply(ops, self.mixer.attend(ops, step, *rows))


class Mamba2(Llama):
    """The whole model."""

    recurrent_class = MambaLayer
