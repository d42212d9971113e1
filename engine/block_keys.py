"""Keys of KV blocks. The scheduler's prefix index and KV events name blocks by them, and tokenizers look prompts up by them.

A full block's key is chained: `hash_block(parent key, its token ids)`, so that equal keys mean equal tokens from the first
position on. A key also covers everything besides token ids that a block's KV depends on (`BlockExtras`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from engine.messages import AdapterUse, MediaItem, MediaUnit
from engine.messages.cache import ExtraKeys
from shm.blake2 import blake2b

ROOT = b""  # the parent of a chain's first block
KEY_BYTES = 32


def hash_block(parent: bytes, token_ids: bytes, extra: ExtraKeys = ()) -> bytes:
    """Return the key of a full block: blake2b over the parent's key, the block's int32 token ids and everything else that its
    KV depends on."""
    digest = blake2b(parent, digest_size=KEY_BYTES)
    digest.update(token_ids)
    if extra:
        digest.update(msgspec.msgpack.encode(extra))
    return digest.digest()


class BlockExtras:
    """Everything besides token ids that a prompt's block keys depend on.

    The adapter's fingerprint, with index -1, is in every key; the first block's key has the salt, which separates requests with
    different salts. Each key names the units that overlap its block, with the first of their tokens in the block. Causal tokens
    see all positions up to their own. If a block has other tokens, its key covers the first and last position that they see; if
    one of them sees positions behind the block, also the ids, units and bounds of the tokens up to the last of these positions,
    because the KV depends on them.
    """

    __slots__ = ("_adapter", "_bounds", "_ends", "_salt", "_units", "forward_spans")

    def __init__(
        self, units: Sequence[tuple[int, int, bytes]], bounds: Sequence[int] = (), salt: str = "", adapter: str = ""
    ) -> None:
        """`units`: start, end and hash of each, in order. `bounds`: first and last key of each of the first prompt tokens; the
        others are causal.
        `adapter`: its fingerprint, hexadecimal."""
        self._adapter = bytes.fromhex(adapter)
        self._units = units
        self._salt = salt.encode()
        self._ends = [end for _, end, _ in units]
        self._bounds = array("i", bounds)
        self.forward_spans = forward_spans(self._bounds)

    @classmethod
    def of(
        cls,
        units: Sequence[MediaUnit],
        media: Sequence[MediaItem],
        mask_bounds: bytes,
        salt: str = "",
        adapter: AdapterUse | None = None,
    ) -> BlockExtras | None:
        """Return None if the keys cover token ids alone."""
        if not units and not mask_bounds and not salt and adapter is None:
            return None
        spans = [(unit.start, unit.start + unit.num_tokens, media[unit.item].unit_hashes[unit.index]) for unit in units]
        return cls(spans, array("i", mask_bounds) or bounds_of_units(units), salt, "" if adapter is None else adapter.contents)

    def of_block(self, token_ids: array[int], start: int, end: int) -> ExtraKeys:
        """Return the extra keys of the block of positions [start, end)."""
        index = bisect_right(self.forward_spans, (end, 0)) - 1  # the last that begins before the block ends
        reach = max(end, self.forward_spans[index][1]) if index >= 0 else end
        extra: list[bytes | tuple[bytes, int]] = [(self._adapter, -1)] if self._adapter else []  # a salt cannot look like this
        extra += [self._salt] if self._salt and not start else []
        for unit_start, _, unit_hash in self._units[bisect_right(self._ends, start) :]:
            if unit_start >= reach:
                break
            extra.append((unit_hash, max(0, start - unit_start)))
        bounds = self._bounds[2 * start : 2 * reach]
        if bounds != array("i", [bound for position in range(start, start + len(bounds) // 2) for bound in (0, position)]):
            extra += [bounds.tobytes(), token_ids[end:reach].tobytes()]
        return tuple(extra)


def bounds_of_units(units: Sequence[MediaUnit]) -> array[int]:
    """Return the first and last key of each token up to the last unit; none if all are causal."""
    if not any(unit.sees_all for unit in units):
        return array("i")
    bounds = array("i", [bound for position in range(units[-1].start + units[-1].num_tokens) for bound in (0, position)])
    for unit in units:
        if unit.sees_all:
            end = unit.start + unit.num_tokens
            bounds[2 * unit.start + 1 : 2 * end : 2] = array("i", [end - 1]) * unit.num_tokens
    return bounds


def forward_spans(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans [start, end) of positions that see later ones, in order and separate: a step computes all or none of a
    span."""
    spans: list[tuple[int, int]] = []
    for position, last in enumerate(bounds[1::2]):
        if last > position:
            if spans and position < spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], last + 1)
            else:
                spans.append((position, last + 1))
    return spans


def hash_blocks(
    token_ids: array[int], block_size: int, keys: list[bytes], num_tokens: int, extras: BlockExtras | None = None
) -> None:
    """Extend `keys` to one key for each full block of `token_ids[:num_tokens]`."""
    for index in range(len(keys), num_tokens // block_size):
        start, end = index * block_size, (index + 1) * block_size
        extra = () if extras is None else extras.of_block(token_ids, start, end)
        keys.append(hash_block(keys[-1] if keys else ROOT, token_ids[start:end].tobytes(), extra))
