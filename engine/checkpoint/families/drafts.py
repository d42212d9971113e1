"""Tensor names of MTP layers, by family (multi-token prediction; DeepSeek-AI 2024, section 2.2).

Used by `workers/models/mtp.py`, and to find out whether a checkpoint has MTP layers. In names, `{index}` counts the modules
from 0, and `{layer}` counts on from the number of trunk layers.
"""

from __future__ import annotations

import msgspec


class DraftNames(msgspec.Struct, frozen=True):
    """h'_j = projection([embedding_norm(embedding of token j), hidden_norm(h_{j - 1})]), the layer, the norm, the head."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    norm: str = "model.norm"  # the trunk's
    head: str = ""  # empty: the trunk's
    is_fed_normalized: bool = True  # the next draft gets h' after the norm, as the head does
    is_sparse: bool = False  # the layer has experts if the trunk's last layer has

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors besides the layer and the tensors of the trunk."""
        own = (self.embedding_norm, self.hidden_norm, self.projection)
        return own if self.norm == "model.norm" else (*own, self.norm)

    def of(self, index: int, num_layers: int) -> DraftNames:
        """Return the names of one module."""
        parts = ("embedding_norm", "hidden_norm", "projection", "layer", "norm", "head")
        named = {part: getattr(self, part).format(index=index, layer=num_layers + index) for part in parts}
        return msgspec.structs.replace(self, **named)


DEEPSEEK_V3 = DraftNames(
    "model.layers.{layer}.enorm",
    "model.layers.{layer}.hnorm",
    "model.layers.{layer}.eh_proj",
    "model.layers.{layer}",
    "model.layers.{layer}.shared_head.norm",
    "model.layers.{layer}.shared_head.head",
    is_fed_normalized=False,
    is_sparse=True,
)
# The layer is dense also in models with experts.
ERNIE4_5 = DraftNames(
    "model.mtp_emb_norm.{index}",
    "model.mtp_hidden_norm.{index}",
    "model.mtp_linear_proj.{index}",
    "model.mtp_block.{index}",
)
# Our own names, like Qwen3-Next's: all modules share everything except the layer.
QWEN3 = DraftNames(
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.layers.{index}",
    "mtp.norm",
    is_sparse=True,
)
