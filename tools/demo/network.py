"""The network of the demonstration model, for training: a Qwen3 in torch.

Called by `train.py`, `checkpoint.py` and `examine.py`; Tokamak itself serves the checkpoint with its own kernels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, with the names of config.json."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class Attention(nn.Module):
    """Grouped-query attention with a norm on each query and key head, as in Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_attention_heads * shape.head_dim
        key_value_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """`hidden` [rows, tokens, hidden], `mask` [rows, 1, tokens, tokens], true where a query may look at a key."""
        output: Tensor = self.o_proj(self.mixed(*self.projected(hidden, rotation), mask))
        return output

    def projected(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [rows, heads, tokens, dimensions]."""
        rows, tokens, _ = hidden.shape
        heads = (rows, tokens, -1, self.shape.head_dim)
        query = rotated(self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2), rotation)
        key = rotated(self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2), rotation)
        return query, key, self.v_proj(hidden).view(heads).transpose(1, 2)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """[rows, queries, heads * dimensions], before the last projection."""
        num_queries_per_key = self.shape.num_attention_heads // self.shape.num_key_value_heads
        key = key.repeat_interleave(num_queries_per_key, dim=1)
        value = value.repeat_interleave(num_queries_per_key, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2)


def rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [..., positions, dimensions] turned by cosines and sines of their positions (RoFormer, 2021; halves are pairs)."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        return self.behind_attention(hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask))

    def behind_attention(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Qwen3(nn.Module):
    """The network; parameters are named as in a Hugging Face Qwen3 checkpoint, without "model."."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        draw_matrices(self.layers, shape)

    def forward(self, token_ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        """Return logits [wanted, vocabulary] at the flat positions `wanted` of `token_ids` [rows, tokens]."""
        logits: Tensor = self.norm(self.residual(token_ids, mask).flatten(0, 1)[wanted]) @ self.embed_tokens.weight.T
        return logits

    def residual(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the output of the last layer, [rows, tokens, hidden]."""
        hidden: Tensor = self.embed_tokens(token_ids)
        turns = rotation(self.shape, token_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, turns, mask)
        return hidden


def draw_matrices(module: nn.Module, shape: Shape) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 2 * shape.num_hidden_layers if is_output else 1
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1] * scale))


def rotation(shape: Shape, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for positions from 0 on."""
    size = shape.head_dim
    frequencies = shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()
