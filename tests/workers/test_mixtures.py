"""Models with experts, in many shapes, against a forward pass written out in numpy, float64: which layers have experts, who is
chosen and what it weighs, what all rows share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.messages import SamplingParams
from tests.ops.test_experts import chosen
from tests.workers.checkpoints import drawn_tensors, write_checkpoint
from tests.workers.serving import Sample, Serving, make_runner
from workers.models import declare_model
from workers.models.mlp import Mixture

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
QWEN = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "moe_intermediate_size": 20}
ERNIE = {**COMMON, "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 20}
SHAPES: dict[str, dict[str, Any]] = {
    "12 experts, 3 chosen, weights as they are": {**QWEN, "num_experts": 12, "num_experts_per_tok": 3},
    "every other layer, normalized": {
        **QWEN,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "first layer dense, one expert chosen, gelu, tied": {
        **QWEN,
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [0],
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "all experts chosen": {**QWEN, "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True},
    "no sparse layer": {**QWEN, "mlp_only_layers": [0, 1, 2]},
    "ernie, no shared experts": {**ERNIE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 0},
    "ernie, two shared experts, every other layer": {
        **ERNIE,
        "num_hidden_layers": 5,
        "moe_num_experts": 16,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 3,
        "moe_norm_min": 0.9,
    },
    "ernie, uncorrected": {**ERNIE, "moe_num_experts": 7, "moe_k": 3, "moe_use_aux_free": False, "moe_num_shared_experts": 1},
}
SPARSE = {  # by the models' own rules, worked out by hand
    "every other layer, normalized": [1],
    "first layer dense, one expert chosen, gelu, tied": [1, 2],
    "no sparse layer": [],
    "ernie, no shared experts": [1, 2],
    "ernie, two shared experts, every other layer": [1, 3],
    "ernie, uncorrected": [1, 2],
}
PROMPT = [5 + index * 11 % 80 for index in range(40)]


class Forward:
    """One pass over a prompt."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray]) -> None:
        self.config = config
        self.tensors = {name: values.astype(np.float64) for name, values in tensors.items()}

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Of what follows each token, [tokens, vocabulary]."""
        residual = self.tensors["model.embed_tokens.weight"][token_ids]
        for index in range(self.config.num_layers):
            prefix = f"model.layers.{index}"
            residual = residual + self.attention(f"{prefix}.self_attn", self.norm(f"{prefix}.input_layernorm", residual))
            h = self.norm(f"{prefix}.post_attention_layernorm", residual)
            is_sparse = self.config.experts is not None and index in self.config.experts.sparse_layers
            residual = residual + (self.mixture(prefix, h) if is_sparse else self.mlp(f"{prefix}.mlp", h))
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = self.linear(head, self.norm("model.norm", residual))
        logits = logits - logits.max(1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return np.asarray(x / scale * self.tensors[f"{name}.weight"])

    def attention(self, prefix: str, h: np.ndarray) -> np.ndarray:
        dim = self.config.head_dim
        q, k, v = (self.linear(f"{prefix}.{part}_proj", h).reshape(len(h), -1, dim) for part in "qkv")
        if self.config.architecture == "qwen3_moe":
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


@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_numpy(name: str, tmp_path: Path) -> None:
    """Every prompt token's log-probability, and the most likely answer, of the reference and of the native ops, whole and in
    chunks."""
    config = write_checkpoint(tmp_path, SHAPES[name])
    expected = Forward(config, drawn_tensors(config)).logprobs(PROMPT)
    for options in ({"ops": "reference", "plan": "eager"}, {"ops": "native"}):
        runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40, **options)
        answers = []
        for chunk in (512, 7):
            serving = Serving(runner, chunk=chunk)
            sample = Sample(PROMPT, SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=0), 4)
            serving.place(sample, 1)
            serving.run([sample])
            answers.append(sample.answer())
        found = [sample.prompt_logprobs[position] for position in range(1, len(PROMPT))]
        np.testing.assert_allclose(found, expected[np.arange(len(PROMPT) - 1), PROMPT[1:]], atol=2e-4)
        assert sample.outputs[0] == expected[-1].argmax()
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_layers(name: str, tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, SHAPES[name])
    model, _ = declare_model(config)
    assert [index for index, layer in enumerate(model.layers) if isinstance(layer.mlp, Mixture)] == SPARSE[name]
