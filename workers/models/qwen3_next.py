"""Qwen3-Next and Qwen3.5 (Qwen team 2025, 2026): Llama's decoder in which most layers follow the gated delta rule (Yang et al.
2024) in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from ops.modules import Columns, DeltaRule, RecurrentCache, Tensor
from ops.table import Inputs, OpTable
from workers.models.adapted import linear
from workers.models.llama import Llama
from workers.models.mlp import feed_forward
from workers.models.norms import declare_norm
from workers.weights.declaration import Weights


class DeltaLayer:
    """A layer with a state of each head in place of keys and values."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        sizes, hidden, module = config.recurrence, config.hidden_size, f"{prefix}.linear_attn"
        assert sizes is not None, "the config has no recurrent layers"
        heads, width = sizes.num_value_heads, sizes.values_width
        self.input_norm = declare_norm(config, weights, f"{prefix}.input_layernorm")
        self.rule = weights.delta_rule(module, sizes)
        own = delta_columns(self.rule)
        names, widths = [f"{module}.in_proj_qkv", f"{module}.in_proj_z"], [sizes.channels, width]
        self.projection = weights.linear(names, hidden, widths, columns=own)
        self.rates = weights.exact_linear([f"{module}.in_proj_b", f"{module}.in_proj_a"], hidden, [heads, heads])
        self.rule.decay_first = heads
        self.convolution = weights.convolution(f"{module}.conv1d", sizes, own[:-1])
        self.norm = weights.gated_norm(f"{module}.norm", width, sizes.value_dim, config.rms_norm_eps)
        self.norm.gate_first = sizes.channels
        self.output = weights.linear([f"{module}.out_proj"], width, [hidden])
        self.inner_norm = declare_norm(config, weights, f"{prefix}.post_attention_layernorm")
        self.mlp = feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: RecurrentCache) -> tuple[Tensor, ...]:
        states = cache.places, cache.states
        projected, rates = linear(ops, inputs, h, self.projection), linear(ops, inputs, h, self.rates)
        x = ops.convolve(inputs, projected, self.convolution, *states)
        return ops.delta_rule(inputs, x, rates, rates, self.rule, *states), projected

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: RecurrentCache) -> Tensor:
        x, projected = rows
        h = ops.all_gather(ops.gated_norm(x, projected, self.norm))
        return ops.all_gather(linear(ops, step, h, self.output))


def delta_columns(rule: DeltaRule) -> Columns:
    """Return the columns of queries, keys, values and gates that this rank computes; none: all."""
    if rule.own is None:
        return ()
    own, keys, values = rule.own, rule.key_dim, rule.value_dim
    all_keys, all_values = rule.num_key_heads * keys, rule.num_value_heads * values
    spans = (
        (0, own.first_kv * keys, own.kv_count * keys),
        (all_keys, own.first_kv * keys, own.kv_count * keys),
        (2 * all_keys, own.first * values, own.count * values),
        (2 * all_keys + all_values, own.first * values, own.count * values),
    )
    return tuple((at + first, at + first + count) for at, first, count in spans)


class Qwen3Next(Llama):
    """The whole model."""

    recurrent_class = DeltaLayer
