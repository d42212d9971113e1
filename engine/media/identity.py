"""Hash of an item: over all its bytes, its kind, and every setting that affects the encoder's input.

Identifiers from a client or a file (a uuid, an EXIF id) are not trusted. The hashes are part of the keys of the prefix cache
and the encoder cache: 32 bytes of BLAKE2b, so that no file with the hash of another one can be constructed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Buffer

HASH_BYTES = 32
_encoder = msgspec.msgpack.Encoder(order="deterministic")


def item_hash(facts: tuple[object, ...], parts: Iterable[Buffer]) -> bytes:
    """Return the hash of an item with these parts; `facts` is everything else that counts, encodable by msgspec."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (_encoder.encode(facts), *parts):
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def unit_hash(item: bytes, index: int) -> bytes:
    """Return the hash of a unit of an item."""
    return hashlib.blake2b(index.to_bytes(8, "little"), digest_size=HASH_BYTES, key=item).digest()
