"""LFM2 (Liquid AI 2025): Llama's decoder in which most layers have a short convolution in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from ops.modules import RecurrentCache, Tensor
from ops.table import Inputs, OpTable
from workers.models.adapted import linear
from workers.models.llama import Llama
from workers.models.mlp import feed_forward
from workers.models.norms import declare_norm
from workers.weights.declaration import Weights


class ConvolutionLayer:
    """A layer with gates before and after a convolution of each column: out(c * convolution(b * x)), where b, c and x are
    projections."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        sizes, hidden, module = config.recurrence, config.hidden_size, f"{prefix}.conv"
        assert sizes is not None, "the config has no convolutions"
        self.input_norm = declare_norm(config, weights, f"{prefix}.operator_norm")
        own = weights.share.columns((hidden, hidden, hidden))
        self.projection = weights.linear([f"{module}.in_proj"], hidden, [3 * hidden], sizes.has_bias, own)
        self.convolution = weights.convolution(f"{module}.conv", sizes, own[:1], activation="", is_gated=True)
        self.output = weights.linear([f"{module}.out_proj"], hidden, [hidden], sizes.has_bias)
        self.inner_norm = declare_norm(config, weights, f"{prefix}.ffn_norm")
        self.mlp = feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: RecurrentCache) -> tuple[Tensor, ...]:
        projected = linear(ops, inputs, h, self.projection)
        convolved = ops.convolve(inputs, projected, self.convolution, cache.places, cache.states)
        return (ops.all_gather(convolved),)  # before rows are kept, which copies whole rows

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: RecurrentCache) -> Tensor:
        return ops.all_gather(linear(ops, step, rows[0], self.output))


class Lfm2(Llama):
    """The whole model."""

    recurrent_class = ConvolutionLayer
