"""Kimi Linear (Moonshot AI 2025): DeepSeek-V3's decoder in which most layers follow the delta rule in place of attention. Each
key has a decay of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from ops.modules import RecurrentCache, Tensor
from ops.table import Inputs, OpTable
from workers.models.adapted import linear
from workers.models.deepseek_v3 import DeepseekV3
from workers.models.mlp import feed_forward
from workers.models.qwen3_next import delta_columns
from workers.weights.declaration import Weights


class KimiDeltaLayer:
    """A layer with a state of each head in place of keys and values. Decays and the gates of outputs are projected in two
    steps, through a narrow one."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        sizes, hidden, module = config.recurrence, config.hidden_size, f"{prefix}.self_attn"
        assert sizes is not None, "the config has no recurrent layers"
        heads, width, dim = sizes.num_value_heads, sizes.values_width, sizes.value_dim
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", hidden, config.rms_norm_eps)
        self.rule = weights.delta_rule(module, sizes)
        own = delta_columns(self.rule)
        inputs, of_gates = own[:-1], tuple((begin - 3 * width, end - 3 * width) for begin, end in own[-1:])
        names = [f"{module}.{part}_proj" for part in "qkv"]
        self.projection = weights.linear(names, hidden, [width] * 3, columns=inputs)
        self.convolution = weights.convolution(f"{module}.conv1d", sizes, inputs)
        self.convolution.names = tuple(f"{module}.{part}_conv1d" for part in "qkv")
        self.rates = weights.exact_linear([f"{module}.b_proj"], hidden, [heads])
        self.decays = weights.exact_linear([f"{module}.f_a_proj"], hidden, [dim])
        self.decays_by_key = weights.exact_linear([f"{module}.f_b_proj"], dim, [width])
        self.gates = weights.linear([f"{module}.g_a_proj"], hidden, [dim], columns=())
        self.gates_by_value = weights.linear([f"{module}.g_b_proj"], dim, [width], columns=of_gates)
        self.norm = weights.gated_norm(f"{module}.o_norm", width, dim, config.rms_norm_eps)
        self.norm.activation = "sigmoid"
        self.output = weights.linear([f"{module}.o_proj"], width, [hidden])
        self.inner_norm = weights.norm(f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self.mlp = feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: RecurrentCache) -> tuple[Tensor, ...]:
        states = cache.places, cache.states
        x = ops.convolve(inputs, linear(ops, inputs, h, self.projection), self.convolution, *states)
        decays, rates = ops.linear(ops.linear(h, self.decays), self.decays_by_key), ops.linear(h, self.rates)
        gates = linear(ops, inputs, linear(ops, inputs, h, self.gates), self.gates_by_value)
        return ops.delta_rule(inputs, x, decays, rates, self.rule, *states), gates

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: RecurrentCache) -> Tensor:
        x, gates = rows
        h = ops.all_gather(ops.gated_norm(x, gates, self.norm))
        return ops.all_gather(linear(ops, step, h, self.output))


class KimiLinear(DeepseekV3):
    """The whole model."""

    recurrent_class = KimiDeltaLayer
