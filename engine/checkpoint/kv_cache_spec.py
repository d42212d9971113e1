"""Bytes of a model's keys and values in memory.

Used by the launcher (number of blocks, size of the arena) and by the workers (tensors in it).
"""

from __future__ import annotations

import msgspec

from engine.checkpoint.model_config import ModelConfig

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}  # bytes of scales per position and head, for keys and for values
_NUM_LATENT_HEADS = 1  # latent attention keeps one rotated key and, as value, one latent for all heads


class KVCacheSpec(msgspec.Struct, frozen=True):
    """Shape of a KV cache without its number of blocks."""

    num_layers: int
    num_kv_heads: int
    key_dim: int  # per head
    value_dim: int
    block_size: int  # positions per block
    dtype: str  # "float32" | "bfloat16" | "int8"
    has_marks: bool = False  # a byte per position: whether draft layers have keys and values there

    @staticmethod
    def of(model: ModelConfig, block_size: int, dtype: str, has_drafts: bool = False) -> KVCacheSpec:
        """Return the spec of a model. `has_drafts`: draft layers have keys and values, too."""
        heads, key_dim, value_dim = model.num_kv_heads, model.head_dim, model.head_dim
        if model.latents is not None:
            heads, key_dim, value_dim = _NUM_LATENT_HEADS, model.latents.rotary_dim, model.latents.latent_dim
        if model.bidirectional is not None:  # data of a layer is not needed later: all layers share the memory
            return KVCacheSpec(1, heads, key_dim, value_dim, block_size, dtype)
        num_layers = model.num_layers + (model.num_draft_layers if has_drafts else 0)
        return KVCacheSpec(num_layers, heads, key_dim, value_dim, block_size, dtype, has_drafts)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of a block in one layer."""
        return self._bytes_of(self.key_dim)

    @property
    def value_bytes(self) -> int:
        return self._bytes_of(self.value_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: keys and values in every layer, and marks."""
        return self.layer_bytes_per_block + (self.block_size if self.has_marks else 0)

    @property
    def layer_bytes_per_block(self) -> int:
        return self.num_layers * (self.key_bytes + self.value_bytes)

    def _bytes_of(self, dim: int) -> int:
        return self.block_size * self.num_kv_heads * (dim * _DTYPE_BYTES[self.dtype] + _SCALE_BYTES[self.dtype])

    def arena_bytes(self, num_blocks: int) -> int:
        """Return the bytes of `num_blocks` blocks and block 0, the dummy that padded rows write to."""
        return (num_blocks + 1) * self.bytes_per_block
