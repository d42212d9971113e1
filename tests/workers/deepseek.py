"""DeepSeek-V3's forward pass by its paper, in float64 and numpy: keys and values of each head, nothing absorbed, nothing
cached.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from workers.weights.rotary import rotary_tables

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "eos_token_id": 2,
    "transformers_version": "5.0.0",
}


class DeepseekForward:
    """A forward pass; `config` is that of config.json, with every option."""

    head = "lm_head"

    def __init__(self, config: dict[str, Any], model: ModelConfig, tensors: dict[str, np.ndarray]) -> None:
        self.config, self.tensors, self.model = config, tensors, model
        self.cosines, self.sines, self.partners = rotary_tables(model.rope, config["qk_rope_head_dim"], 512)

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Return the log-probabilities of every token after each position: [positions, vocab]."""
        logits = self.linear("lm_head", self.hidden(token_ids))
        logits = logits - logits.max(-1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))

    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """Return each token's hidden state, as the head reads it: [positions, hidden]."""
        x = self.embedded(token_ids)
        for index in range(self.config["num_hidden_layers"]):
            x = self.layer(f"model.layers.{index}", x, is_sparse=index >= self.config["first_k_dense_replace"])
        return self.norm("model.norm", x)

    def embedded(self, token_ids: list[int]) -> np.ndarray:
        return self._get("model.embed_tokens.weight")[token_ids]

    def layer(self, prefix: str, x: np.ndarray, is_sparse: bool) -> np.ndarray:
        """Compute a layer for rows that follow each other."""
        x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
        h = self._norm(x, f"{prefix}.post_attention_layernorm")
        return np.asarray(x + (self._experts(h, f"{prefix}.mlp") if is_sparse else self._mlp(h, f"{prefix}.mlp")))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._linear(x, name)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._norm(x, name)

    def _get(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self._get(f"{name}.weight").T
        return y + self._get(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def _norm(self, x: np.ndarray, name: str, epsilon: float = 0.0) -> np.ndarray:
        mean = (x**2).mean(-1, keepdims=True) + (epsilon or self.config["rms_norm_eps"])
        return np.asarray(x / np.sqrt(mean) * self._get(f"{name}.weight"))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotate [positions, heads, rotary]."""
        length = len(x)
        return np.asarray(x * self.cosines[:length, None] + x[..., self.partners] * self.sines[:length, None])

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        config, length = self.config, len(x)
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        if config["q_lora_rank"] is None:
            queries = self._linear(x, f"{name}.q_proj")
        else:
            compressed = self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
            queries = self._linear(compressed, f"{name}.q_b_proj")
        queries = queries.reshape(length, heads, -1)
        latents, rotary = np.split(self._linear(x, f"{name}.kv_a_proj_with_mqa"), [config["kv_lora_rank"]], axis=1)
        expanded = self._linear(self._norm(latents, f"{name}.kv_a_layernorm", 1e-6), f"{name}.kv_b_proj")
        keys, values = np.split(expanded.reshape(length, heads, -1), [plain], axis=2)
        scores = np.einsum("qhd,khd->hqk", queries[..., :plain], keys)
        scores += np.einsum("qhd,kd->hqk", self._rotate(queries[..., plain:]), self._rotate(rotary[:, None])[:, 0])
        scores = scores * self._scale(queries.shape[-1]) + np.triu(np.full((length, length), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
        return self._linear(attended.reshape(length, -1), f"{name}.o_proj")

    def _scale(self, head_dim: int) -> float:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        mscale = 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope["factor"]) + 1.0 if rope else 1.0
        return float(head_dim**-0.5 * mscale**2)

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _experts(self, x: np.ndarray, name: str) -> np.ndarray:
        config = self.config
        scores = 1 / (1 + np.exp(-self._linear(x, f"{name}.gate")))
        left = scores + self._get(f"{name}.gate.e_score_correction_bias")
        grouped = left.reshape(len(x), config["n_group"], -1)
        best = np.argsort(-np.sort(grouped, -1)[..., -2:].sum(-1), kind="stable")[:, : config["topk_group"]]
        outside = np.ones(grouped.shape[:2], np.bool_)
        np.put_along_axis(outside, best, False, 1)
        left = np.where(outside[..., None], -np.inf, grouped).reshape(left.shape)
        chosen = np.argsort(-left, kind="stable")[:, : config["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, 1)
        if config["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        y = self._mlp(x, f"{name}.shared_experts") if config["n_shared_experts"] else np.zeros_like(x)
        for row, choices in enumerate(chosen):
            for choice, expert in enumerate(choices):
                result = self._mlp(x[row : row + 1], f"{name}.experts.{expert}")[0]
                y[row] += weights[row, choice] * config["routed_scaling_factor"] * result
        return y
