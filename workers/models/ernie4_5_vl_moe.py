"""ERNIE 4.5 VL (Baidu 2025): ERNIE 4.5 with a separate set of experts for media tokens.

Both sets are computed one after the other, each only for its own rows: the second adds the result of the first, like the output
of a shared MLP. A step without media skips the media experts.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.models.llama import Llama, LlamaLayer
from workers.models.mlp import FeedForward, Mixture
from workers.weights.declaration import Weights

TEXT, MEDIA = range(2)  # values of `AttentionMetadata.expert_sets`


class IsolatedMixture(FeedForward):
    """A mixture for text, with the shared MLP of all tokens, and one for media."""

    def __init__(self, config: ModelConfig, text: ExpertsConfig, media: ExpertsConfig, layer: str, weights: Weights) -> None:
        self.text = Mixture(config, text, layer, weights, set=TEXT)
        self.media = Mixture(config, media, layer, weights, set=MEDIA, first=text.num_experts)

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return ops.all_gather(self.media.columns(ops, step, h, self.text.columns(ops, step, h, None)))


class Ernie4_5VLMoeLayer(LlamaLayer):
    """One decoder layer's weights."""

    def feed_forward(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward | None:
        text, media = config.experts, config.vision_experts
        if text is None or media is None or index not in text.sparse_layers:
            return super().feed_forward(config, index, weights, prefix)
        return IsolatedMixture(config, text, media, prefix, weights)


class Ernie4_5VLMoe(Llama):
    """The whole model."""

    layer_class = Ernie4_5VLMoeLayer
