"""A forward pass of the families without latents in numpy, float64, without caches or batches."""

from __future__ import annotations

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from tests.ops.test_experts import chosen
from workers.models import declare_model


class Forward:
    """One pass through a prompt."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray]) -> None:
        self.config = config
        self.tensors = {name: values.astype(np.float64) for name, values in tensors.items()}

    @property
    def head(self) -> str:
        return "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Return the log-probabilities of the token after each token, [tokens, vocabulary]."""
        logits = self.linear(self.head, self.hidden(token_ids))
        if self.config.tie_word_embeddings:  # of the weight alone
            logits += self.tensors.get("lm_head.bias", 0)
        logits = logits - logits.max(1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))

    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """Return each token's hidden state, as the head reads it: [tokens, hidden]."""
        residual = self.embedded(token_ids)
        for index in range(self.config.num_layers):
            is_sparse = self.config.experts is not None and index in self.config.experts.sparse_layers
            residual = self.layer(f"model.layers.{index}", residual, is_sparse)
        return self.norm("model.norm", residual)

    def embedded(self, token_ids: list[int]) -> np.ndarray:
        return self.tensors["model.embed_tokens.weight"][token_ids]

    def layer(self, prefix: str, residual: np.ndarray, is_sparse: bool) -> np.ndarray:
        """Compute a layer for rows that follow each other."""
        residual = residual + self.attention(f"{prefix}.self_attn", self.norm(f"{prefix}.input_layernorm", residual))
        h = self.norm(f"{prefix}.post_attention_layernorm", residual)
        return np.asarray(residual + (self.mixture(prefix, h) if is_sparse else self.mlp(f"{prefix}.mlp", h)))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0))

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return np.asarray(x / scale * self.tensors[f"{name}.weight"])

    def attention(self, prefix: str, h: np.ndarray) -> np.ndarray:
        dim = self.config.head_dim
        q, k, v = (self.linear(f"{prefix}.{part}_proj", h).reshape(len(h), -1, dim) for part in "qkv")
        if self.config.architecture.startswith("qwen3"):
            q, k = self.norm(f"{prefix}.q_norm", q), self.norm(f"{prefix}.k_norm", k)
        q, k = self.rotated(q), self.rotated(k)
        group = q.shape[1] // k.shape[1]
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) / np.sqrt(dim)
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(f"{prefix}.o_proj", np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, 1)).reshape(len(h), -1))

    def rotated(self, x: np.ndarray) -> np.ndarray:
        dim, half = self.config.head_dim, self.config.head_dim // 2
        turns = np.exp(1j * np.arange(len(x))[:, None] * self.config.rope.theta ** (-np.arange(half) / half))[:, None]
        pairs = (slice(0, dim, 2), slice(1, dim, 2)) if self.config.rope.is_interleaved else (slice(half), slice(half, dim))
        turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * turns
        result = np.empty_like(x)
        result[..., pairs[0]], result[..., pairs[1]] = turned.real, turned.imag
        return result

    def mlp(self, prefix: str, h: np.ndarray) -> np.ndarray:
        gate, up = self.linear(f"{prefix}.gate_proj", h), self.linear(f"{prefix}.up_proj", h)
        if self.config.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return self.linear(f"{prefix}.down_proj", gate * up)

    def mixture(self, layer: str, h: np.ndarray) -> np.ndarray:
        experts = self.config.experts
        assert experts is not None
        logits = self.linear(f"{layer}.mlp.gate", h)
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        correction = (
            self.tensors[f"{layer}.{experts.correction}"].reshape(-1) if experts.correction else np.zeros(experts.num_experts)
        )
        _, weights = declare_model(self.config)
        results = np.zeros_like(h)
        for row, own_scores in enumerate(scores):
            for expert, weight in zip(*chosen(own_scores, weights.routers[0].rule, correction), strict=True):
                results[row] += weight * self.mlp(f"{layer}.mlp.experts.{expert}", h[row])
        if experts.shared_intermediate_size:
            results += self.mlp(f"{layer}.mlp.shared_experts", h)
        return results
