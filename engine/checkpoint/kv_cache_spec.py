"""What the keys and values of a model take in memory.

Used by the launcher (how many blocks, how large an arena) and by the workers (the tensors over it).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}  # of a position and head, keys and values each


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of a KV cache, but for the number of its blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # positions of a block
    dtype: str  # "float32" | "bfloat16" | "int8"

    @staticmethod
    def of(model: ModelConfig, block_size: int, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, block_size, dtype)

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of its positions in every layer."""
        head_bytes = self.head_dim * _DTYPE_BYTES[self.dtype] + _SCALE_BYTES[self.dtype]
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * head_bytes

    def arena_bytes(self, num_blocks: int) -> int:
        """`num_blocks` blocks and block 0, the dummy that takes what padded rows write."""
        return (num_blocks + 1) * self.bytes_per_block
