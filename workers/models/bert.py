"""BERT (Devlin et al. 2019) and its variants: an encoder with bidirectional attention.

Straight-line against the op table, like the decoders. Keys and values use memory of the KV arena, which all layers share and
which is not read after the step; bidirectional attention comes from key bounds (`BatchSlots`). Norms follow the residual sums.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from ops.modules import AttentionShape, KvCache, Linear, Tensor
from ops.table import Inputs, OpTable
from workers.models.llama import Llama
from workers.weights.declaration import Weights


class BertLayer:
    """One layer's weights."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, inner, epsilon = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.qkv = weights.linear(
            [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")], hidden, [hidden] * 3, has_bias=True
        )
        self.output = weights.linear([f"{prefix}.attention.output.dense"], hidden, [hidden], has_bias=True)
        self.attention_norm = weights.layer_norm(f"{prefix}.attention.output.LayerNorm", hidden, epsilon)
        self.first = weights.linear([f"{prefix}.intermediate.dense"], hidden, [inner], has_bias=True)
        self.last = weights.linear([f"{prefix}.output.dense"], inner, [hidden], has_bias=True)
        self.output_norm = weights.layer_norm(f"{prefix}.output.LayerNorm", hidden, epsilon)


class Bert(Llama):
    """The whole model."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.position_tables is not None, f"{config.architecture} is not an encoder"
        self.config = config
        hidden, own = config.hidden_size, config.position_tables
        self.embedding = weights.embedding("embeddings.word_embeddings", config.vocab_size, hidden)
        self.positions = weights.positions(
            "embeddings.position_embeddings", "embeddings.token_type_embeddings", own, config.max_position_embeddings, hidden
        )
        self.embedding_norm = weights.layer_norm("embeddings.LayerNorm", hidden, config.rms_norm_eps)
        self.shape = AttentionShape(config.num_attention_heads, config.num_kv_heads, config.head_dim)
        self.blocks = [BertLayer(config, weights, f"encoder.layer.{index}") for index in range(config.num_layers)]
        self.rotary = weights.rotary(config.rope, config.head_dim)
        self.dense: Linear | None = None  # of classifiers
        self.head: Linear | None = None
        if config.task == "classify":
            dense, head = ("classifier.dense", "classifier.out_proj") if own.has_deep_head else ("pooler.dense", "classifier")
            self.dense = weights.linear([dense], hidden, [hidden], has_bias=True)
            self.head = weights.linear([head], hidden, [config.num_labels], has_bias=True)

    def forward(self, ops: OpTable, inputs: Inputs, cache: KvCache) -> Tensor:
        step = ops.begin(inputs, cache)
        angles = ops.rotary_angles(inputs, self.rotary)
        layer_cache = cache.layers[0]
        h = ops.embedding(inputs, self.embedding)
        h = ops.add_layer_norm(h, ops.embedding(inputs, self.positions), self.embedding_norm)[0]
        for block in self.blocks:
            queries = ops.rotate_and_store(inputs, ops.linear(h, block.qkv), angles, None, self.shape, layer_cache)
            if block is self.blocks[-1]:
                step, queries, h = ops.keep_rows(step, queries, h)
            attended = ops.linear(ops.attention(step, queries, self.shape, layer_cache), block.output)
            h = ops.add_layer_norm(attended, h, block.attention_norm)[0]
            inner = ops.activate(ops.linear(h, block.first), self.config.activation)
            h = ops.add_layer_norm(ops.linear(inner, block.last), h, block.output_norm)[0]
        return h

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        assert self.dense is not None, "the model only returns hidden states"
        assert self.head is not None, "a dense layer needs a head"
        return ops.linear(ops.activate(ops.linear(ops.take_rows(hidden, row_ids), self.dense), "tanh"), self.head)
