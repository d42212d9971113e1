"""MTP layers, implemented from their formulas in numpy, float64; and checkpoints with such layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from engine.config import SpeculativeConfig
from tests.workers.checkpoints import drawn_tensors, to_joined_layout, write_config, write_safetensors


def drafting(num_drafts: int = 3, *, adaptive: bool = False, method: str = "mtp") -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=num_drafts, adaptive=adaptive)


def write_with_layers(path: Path, config: dict[str, Any], num_layers: int = 1) -> dict[str, np.ndarray]:
    """Write a checkpoint with random weights and `num_layers` layers that draft; return the tensors that the model declares."""
    model = write_config(path, config | {"num_nextn_predict_layers": num_layers})
    tensors = drawn_tensors(model, has_drafts=num_layers > 0)
    is_joined = FAMILIES[model.architecture].has_query_gate
    stored = to_joined_layout(tensors, config) if is_joined else tensors
    write_safetensors(path / "model.safetensors", stored, metadata={"format": "pt"})
    return tensors


class Trunk(Protocol):
    """A forward pass in numpy; rows are consecutive."""

    @property
    def head(self) -> str: ...

    def hidden(self, token_ids: list[int]) -> np.ndarray: ...
    def embedded(self, token_ids: list[int]) -> np.ndarray: ...
    def layer(self, prefix: str, x: np.ndarray, is_sparse: bool) -> np.ndarray: ...
    def linear(self, name: str, x: np.ndarray) -> np.ndarray: ...
    def norm(self, name: str, x: np.ndarray) -> np.ndarray: ...


def draft_tokens(config: ModelConfig, trunk: Trunk, token_ids: list[int], count: int, first: int = 1) -> np.ndarray:
    """Return the logits of `count` draft tokens after `token_ids`, each computed from the likeliest token before it: [count,
    vocab]. Attention sees entries from that of position `first` on."""
    names = FAMILIES[config.architecture].draft_names
    assert names is not None
    h = trunk.hidden(token_ids)
    tokens, before = token_ids[first:], h[first - 1 : -1]
    found = []
    for number in range(count):
        module = names.of(number % config.num_draft_layers, config.num_layers)
        parts = trunk.norm(module.embedding_norm, trunk.embedded(tokens)), trunk.norm(module.hidden_norm, before)
        is_sparse = module.is_sparse and config.experts is not None
        x = trunk.layer(module.layer, trunk.linear(module.projection, np.concatenate(parts, axis=1)), is_sparse)[-1:]
        normed = trunk.norm(module.norm, x)
        found.append(trunk.linear(module.head or trunk.head, normed)[0])
        tokens = [*tokens, int(found[-1].argmax())]
        before = np.concatenate([before, normed if names.is_fed_normalized else x])
    return np.array(found)


def write_walk(path: Path, permutation: np.ndarray, *, is_by_hidden: bool) -> None:
    """Write a model that predicts permutation[v] after v, with a layer that always agrees: it maps the hidden state of a token
    to that of the next one, or uses the token's embedding. Attention adds nothing."""
    size = len(permutation)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": size - 1,
        "num_nextn_predict_layers": 1,
    }
    tensors = drawn_tensors(write_config(path, config), has_drafts=True)
    rng = np.random.default_rng(3)
    embedding = np.linalg.qr(rng.standard_normal((size, size)))[0] * np.sqrt(size)
    head = np.empty_like(embedding)
    head[permutation] = embedding / 12  # the likeliest one is not too likely
    turn = embedding[permutation].T @ embedding / size  # of the hidden state of v makes that of permutation[v]
    fixed = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "mtp.fc.weight": np.concatenate(
            [np.zeros_like(turn), turn] if is_by_hidden else [np.eye(size), np.zeros_like(turn)], 1
        ),
    }
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") or "_norm_" in name:
            fixed[name] = np.ones_like(tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            fixed[name] = np.zeros_like(tensor)
    tensors |= {name: tensor.astype(np.float32) for name, tensor in fixed.items()}
    write_safetensors(path / "model.safetensors", tensors, metadata={"format": "pt"})
