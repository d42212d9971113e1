"""Llama (Touvron et al. 2023): the decoder that the other dense architectures vary.

Made by the loader, run by a plan. `ops` is the op table, R the padded number of rows of the step (`ops/table.py`). The config
decides which projections have biases, the window of each layer, which layers have experts and the rotary variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.checkpoint.model_config import ModelConfig
from ops.modules import AttentionShape, HeadNorm, KvCache, LayerCache, Linear, Norm, Tensor
from ops.table import Inputs, OpTable
from workers.encoders.tower import Tower
from workers.models.adapted import linear
from workers.models.mlp import FeedForward, feed_forward
from workers.rank_group.share import head_columns
from workers.weights.declaration import Weights

CLASS_HEAD = "score"  # of classifiers


class Layer(Protocol):
    """A decoder layer, as `Llama.forward` calls it."""

    input_norm: Norm
    inner_norm: Norm
    mlp: FeedForward

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        """Declare layer `index` of the trunk, stored under `prefix`."""

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: LayerCache) -> Tensor:
        """Return the queries of all rows; their keys and values are written to the cache."""

    def attend(self, ops: OpTable, step: Any, queries: Tensor, cache: LayerCache) -> Tensor:
        """Return the attention output for the rows of `step`."""


class DraftLayer(Protocol):
    """A layer that drafts further tokens (`mtp.py`)."""

    def parts(self) -> Sequence[object]:
        """Return all modules whose weights it reads, including the trunk's."""

    def store(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> None:
        """Write entries of accepted tokens: those of `inputs`, with the trunk's `hidden` states before them [R, hidden].
        `begin` must have been called for them."""

    def forward(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Return the input of the head and of the next draft, [R, hidden] each, from the last token of each sequence and the
        `hidden` state before it. Its entry is written to the cache."""

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        """Return logits (`Llama.logits`) from the head's input."""


class LlamaLayer:
    """One decoder layer's weights."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        hidden = config.hidden_size
        self.shape = weights.share.heads(
            AttentionShape(config.num_attention_heads, config.num_kv_heads, config.head_dim, config.sliding_windows[index])
        )
        queries, keys = self.shape.queries_width, self.shape.keys_width
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", hidden, config.rms_norm_eps)
        self.qkv = weights.linear(
            [f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")],
            hidden,
            [queries, keys, keys],
            config.has_qkv_bias,
            head_columns(self.shape),
        )
        self.head_norm: HeadNorm | None = None
        self.output = weights.linear([f"{prefix}.self_attn.o_proj"], queries, [hidden], config.has_output_bias)
        self.inner_norm = weights.norm(f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self.mlp = self.feed_forward(config, index, weights, prefix)

    def feed_forward(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward:
        return feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: LayerCache) -> Tensor:
        qkv = linear(ops, inputs, h, self.qkv)
        return ops.rotate_and_store(inputs, qkv, angles, self.head_norm, self.shape, cache)

    def attend(self, ops: OpTable, step: Any, queries: Tensor, cache: LayerCache) -> Tensor:
        h = ops.all_gather(ops.attention(step, queries, self.shape, cache))
        return ops.all_gather(linear(ops, step, h, self.output))


class Llama:
    """The whole model."""

    layer_class: type[Layer] = LlamaLayer
    encoder: Tower | None = None  # of pictures and video
    drafts: Sequence[DraftLayer] = ()  # MTP layers

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [self.layer_class(config, index, weights, f"model.layers.{index}") for index in range(config.num_layers)]
        self.norm = weights.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = self.declare_head(weights)
        self.rotary = weights.rotary(config.rope, config.head_dim)
        self.num_deepstack = len(config.vision.deepstack_layers) if config.vision else 0

    def declare_head(self, weights: Weights) -> Linear | None:
        """Declare the head; None if only hidden states are needed."""
        config = self.config
        if config.task == "classify":
            return weights.linear([CLASS_HEAD], config.hidden_size, [config.num_labels], columns=())  # whole on every rank
        if config.task == "embed":
            return None
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = weights.linear([name], config.hidden_size, [config.vocab_size], config.has_head_bias)
        head.bias_name = "lm_head.bias"
        if config.tie_word_embeddings:
            self.embedding.tied = head
            head.is_looked_up = True
        return head

    def forward(self, ops: OpTable, inputs: Inputs, cache: KvCache) -> Tensor:
        """Return the last hidden states of the kept rows, normalized [kept, hidden]; keys and values of all rows are written to
        the cache."""
        step = ops.begin(inputs, cache)
        angles = ops.rotary_angles(inputs, self.rotary)
        has_features = inputs.features is not None
        residual = ops.embedding(inputs, self.embedding)
        if has_features:
            residual = ops.take_features(step, residual, 0)
        h = ops.rms_norm(residual, self.layers[0].input_norm)
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=False)):
            if index:
                h, residual = ops.add_rms_norm(h, residual, layer.input_norm)
            queries = layer.store(ops, inputs, h, angles, layer_cache)
            if layer is self.layers[-1]:
                step, queries, residual = ops.keep_rows(step, queries, residual)
            h = layer.attend(ops, step, queries, layer_cache)
            h, residual = ops.add_rms_norm(h, residual, layer.inner_norm)
            h = layer.mlp.forward(ops, step, h)
            if has_features and index < self.num_deepstack:  # Qwen3-VL: features of the encoder's inner layers
                residual = ops.take_features(step, residual, index + 1)
        return ops.add_rms_norm(h, residual, self.norm)[0]

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        """Return logits of the kept rows `row_ids` [m] (m a multiple of the table's row_tile): [m, vocab], or [m, classes]."""
        assert self.head is not None, "the model only returns hidden states"
        return ops.all_gather(ops.linear(ops.take_rows(hidden, row_ids), self.head))
