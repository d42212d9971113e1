"""DeepSeek-V3 (DeepSeek-AI 2024): multi-head latent attention, and experts in all layers but the first few.

The cache has one latent and one rotated key per position, for all heads. The keys and values of a head are linear in the
latent. They are not computed: the key projection is multiplied into the queries, and the value projection follows the
attention. Prefill does the same, because two ways to compute a row would round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from ops.modules import LatentShape, LayerCache, Linear, Norm, Tensor
from ops.table import Inputs, OpTable
from workers.models.adapted import linear
from workers.models.llama import Llama
from workers.models.mlp import feed_forward
from workers.rank_group.share import query_columns
from workers.weights.declaration import Weights
from workers.weights.rotary import score_scale

_LATENT_EPSILON = 1e-6  # independent of rms_norm_eps


class DeepseekV3Layer:
    """One decoder layer's weights."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        latents = config.latents
        assert latents is not None, "the config has no latents"
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = latents.plain_dim + latents.rotary_dim
        scale = head_dim**-0.5 * score_scale(config.rope)
        self.shape = weights.share.heads(LatentShape(heads, latents.plain_dim, latents.rotary_dim, latents.latent_dim, scale))
        columns = query_columns(self.shape)
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", hidden, config.rms_norm_eps)
        attention = f"{prefix}.self_attn"
        self.query_down: Linear | None = None
        self.query_norm: Norm | None = None
        if latents.query_dim:
            self.query_down = weights.linear([f"{attention}.q_a_proj"], hidden, [latents.query_dim], config.has_qkv_bias)
            self.query_norm = weights.norm(f"{attention}.q_a_layernorm", latents.query_dim, _LATENT_EPSILON)
            self.queries = weights.linear([f"{attention}.q_b_proj"], latents.query_dim, [heads * head_dim], columns=columns)
        else:
            self.queries = weights.linear([f"{attention}.q_proj"], hidden, [heads * head_dim], columns=columns)
        compressed_width = latents.latent_dim + latents.rotary_dim
        self.compress = weights.linear([f"{attention}.kv_a_proj_with_mqa"], hidden, [compressed_width], config.has_qkv_bias)
        self.latent_norm = weights.norm(f"{attention}.kv_a_layernorm", latents.latent_dim, _LATENT_EPSILON)
        rows = latents.plain_dim + latents.value_dim
        expand, of_keys, of_values = f"{attention}.kv_b_proj", range(latents.plain_dim), range(latents.plain_dim, rows)
        self.absorb = weights.head_linear(expand, self.shape, rows, of_keys, is_turned=True)
        self.values = weights.head_linear(expand, self.shape, rows, of_values)
        self.output = weights.linear([f"{attention}.o_proj"], heads * latents.value_dim, [hidden], config.has_output_bias)
        self.inner_norm = weights.norm(f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self.mlp = feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: LayerCache) -> tuple[Tensor, ...]:
        x = h
        if self.query_down is not None and self.query_norm is not None:
            x = ops.rms_norm(ops.all_gather(linear(ops, inputs, h, self.query_down)), self.query_norm)
        queries, compressed = linear(ops, inputs, x, self.queries), ops.all_gather(linear(ops, inputs, h, self.compress))
        return (ops.store_latent(inputs, queries, compressed, angles, self.latent_norm, self.shape, cache),)

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: LayerCache) -> Tensor:
        (queries,) = rows
        latents = ops.latent_attention(step, ops.head_linear(queries, self.absorb), queries, self.shape, cache)
        return ops.all_gather(linear(ops, step, ops.all_gather(ops.head_linear(latents, self.values)), self.output))


class DeepseekV3(Llama):
    """The whole model."""

    layer_class = DeepseekV3Layer
