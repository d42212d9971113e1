"""Blocks that are added to, removed from and moved in the prefix cache.

scheduler <-> cache actor    BlocksStored, BlocksRemoved, BlocksCleared, StatesStored, StatesRemoved, BlocksMove, BlocksMoved
"""

from __future__ import annotations

import msgspec

ExtraKeys = tuple[
    bytes | tuple[bytes, int], ...
]  # of a block: the adapter (contents, -1), the salt, units with their first token in the block, masks


class BlocksStored(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A chain of full blocks that can be reused from now on."""

    block_hashes: list[bytes]
    parent_hash: bytes  # empty: the chain starts here
    token_ids: bytes  # int32 [len(block_hashes) * block_size]
    block_size: int
    block_ids: list[int] = []
    extra_keys: list[ExtraKeys] = []  # of each block, what its hash covers besides tokens; empty: nothing, for all of them


class BlocksRemoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


class StatesStored(msgspec.Struct, tag=True, array_like=True, gc=False):
    """States of recurrent layers after these blocks, from which a sequence can continue from now on."""

    block_hashes: list[bytes]


class StatesRemoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    block_hashes: list[bytes]


class BlocksMove(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Copy blocks between tiers ("device", "host", "disk", "remote"); answered by BlocksMoved. Only "device" exists so far; a
    move to another tier gets an error."""

    move_id: int
    source: str
    target: str
    block_hashes: list[bytes]
    block_ids: list[int]  # on the device tier


class BlocksMoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    move_id: int
    error: str = ""
