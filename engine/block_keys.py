"""The keys of KV blocks: what the scheduler's prefix index and KV events name blocks by, and the tokenizer looks prompts up by.

A full block's key is chained: `hash_block(parent key, its token ids)`, so that equal keys mean equal tokens all the way from
the first position.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec

ROOT = b""  # the parent of a chain's first block
KEY_BYTES = 32

ExtraKeys = tuple[int | str | bytes, ...]


def hash_block(parent: bytes, token_ids: bytes, extra: ExtraKeys = ()) -> bytes:
    """The key of a full block: blake2b over the parent's key, the block's int32 token ids and whatever else its KV depends
    on."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    digest.update(token_ids)
    if extra:
        digest.update(msgspec.msgpack.encode(extra))
    return digest.digest()


def hash_blocks(token_ids: array[int], block_size: int, keys: list[bytes], num_tokens: int) -> None:
    """Extend `keys` to one key for each full block of `token_ids[:num_tokens]`."""
    for index in range(len(keys), num_tokens // block_size):
        block = token_ids[index * block_size : (index + 1) * block_size]
        keys.append(hash_block(keys[-1] if keys else ROOT, block.tobytes()))
