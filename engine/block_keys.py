"""The keys of KV blocks: what the scheduler's prefix index and KV events name blocks by, and the tokenizer looks prompts up by.

A full block's key is chained: `hash_block(parent key, its token ids)`, so that equal keys mean equal tokens all the way from
the first position. What a block's KV depends on besides token ids is in the key too (`BlockExtras`).
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
    """The key of a full block: blake2b over the parent's key, the block's int32 token ids and whatever else its KV depends
    on."""
    digest = blake2b(parent, digest_size=KEY_BYTES)
    digest.update(token_ids)
    if extra:
        digest.update(msgspec.msgpack.encode(extra))
    return digest.digest()


class BlockExtras:
    """Everything besides token ids that a prompt's block keys depend on.

    The contents of the adapter, with index -1, are in every block; the first block has the salt, which separates requests of
    different salts. Each block names the units that overlap it, with the first of their tokens that is there. Causal tokens see
    every key up to themselves. Where a block has other tokens, its key holds the first and last key that they see; where one of
    them sees keys behind the block, also the ids, units and bounds of the tokens up to the last of these keys, on which its KV
    depends.
    """

    __slots__ = ("_adapter", "_bounds", "_ends", "_salt", "_units", "forward_spans")

    def __init__(
        self, units: Sequence[tuple[int, int, bytes]], bounds: Sequence[int] = (), salt: str = "", adapter: str = ""
    ) -> None:
        """`units`: start, end and hash of each, in order. `bounds`: first and last key of each prompt token; none: causal.
        `adapter`: its contents, in hexadecimal."""
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
        """None: the keys hold token ids alone."""
        if not units and not mask_bounds and not salt and adapter is None:
            return None
        spans = [(unit.start, unit.start + unit.num_tokens, media[unit.item].unit_hashes[unit.index]) for unit in units]
        return cls(spans, array("i", mask_bounds), salt, "" if adapter is None else adapter.contents)

    def of_block(self, token_ids: array[int], start: int, end: int) -> ExtraKeys:
        """Return the extra keys of the block of positions [start, end)."""
        index = bisect_right(self.forward_spans, (end, 0)) - 1  # the last that begins before the block ends
        reach = max(end, self.forward_spans[index][1]) if index >= 0 else end
        extra: list[bytes | tuple[bytes, int]] = [(self._adapter, -1)] if self._adapter else []  # no salt reads like it
        extra += [self._salt] if self._salt and not start else []
        for unit_start, _, unit_hash in self._units[bisect_right(self._ends, start) :]:
            if unit_start >= reach:
                break
            extra.append((unit_hash, max(0, start - unit_start)))
        bounds = self._bounds[2 * start : 2 * reach]
        if bounds != array("i", [bound for position in range(start, start + len(bounds) // 2) for bound in (0, position)]):
            extra += [bounds.tobytes(), token_ids[end:reach].tobytes()]
        return tuple(extra)


def forward_spans(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans [start, end) of positions that see others ahead, in order and apart: a step computes all or none of a
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
