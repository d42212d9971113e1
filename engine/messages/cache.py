"""Blocks that the prefix cache gains, loses and moves.

scheduler <-> cache actor    BlocksStored, BlocksRemoved, BlocksCleared, BlocksMove, BlocksMoved
"""

from __future__ import annotations

import msgspec

ExtraKeys = tuple[
    bytes | tuple[bytes, int], ...
]  # of a block: the adapter (contents, -1), the salt, units with their first token there, masks


class BlocksStored(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Blocks that became reusable: a chain of full blocks."""

    block_hashes: list[bytes]
    parent_hash: bytes  # empty: the chain starts here
    token_ids: bytes  # int32 [len(block_hashes) * block_size]
    block_size: int
    block_ids: list[int] = []
    extra_keys: list[ExtraKeys] = []  # of each block, what its hash holds besides tokens; empty: of all of them nothing


class BlocksRemoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


class BlocksMove(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Copy blocks between tiers ("device", "host", "disk", "remote"); answered by BlocksMoved. Only "device" exists yet,
    a move to another tier is answered with an error."""

    move_id: int
    source: str
    target: str
    block_hashes: list[bytes]
    block_ids: list[int]  # on the device tier


class BlocksMoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    move_id: int
    error: str = ""
