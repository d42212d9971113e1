"""Vocabularies of Kimi models, stored as `tiktoken.model`, as the contents of a tokenizer.json.

Called by `vocabulary.py`. A line of the file is a token's bytes in base64 and its rank, which is its id. A word that is a token
is one; in others the pair with the lowest rank is merged first, and the leftmost of equal ones. Special tokens have the 256 ids
after the others: those in tokenizer_config.json, and the rest is reserved. The rule that splits a text into words is in the
model's Python code, not in its files.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import orjson

from engine.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.errors import CheckpointError
from engine.tokenizer.settings import AddedToken

_NUM_SPECIAL = 256
_MAX_LINE_BYTES = 4096  # bounds the time that merges of a long token take
_SPLIT_RULE = "kimi-k2"  # of llama.cpp, which is the same
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def tokenizer_json(data: bytes, added_tokens: Sequence[AddedToken]) -> bytes:
    """Return the same vocabulary as a tokenizer.json. Raises CheckpointError."""
    ranks = _ranks(data)
    letters = _byte_letters()
    pieces = {token: "".join(letters[byte] for byte in token) for token in ranks}
    (pattern,) = PRE_TOKENIZERS[_SPLIT_RULE].patterns
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTE_LEVEL]
    return orjson.dumps(
        {
            "version": "1.0",
            "added_tokens": _special_tokens(len(ranks), added_tokens),
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "post_processor": None,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {pieces[token]: rank for token, rank in ranks.items()},
                "merges": [[pieces[first], pieces[second]] for first, second in _merges(ranks)],
            },
        }
    )


def _ranks(data: bytes) -> dict[bytes, int]:
    """Return the tokens, by rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        if not line.strip():
            continue
        if len(line) > _MAX_LINE_BYTES:
            raise CheckpointError(f"line {number + 1} has {len(line)} bytes, at most {_MAX_LINE_BYTES} are supported")
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"line {number + 1} is {line[:80]!r}, expected a token in base64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or b"" in ranks:
        raise CheckpointError(f"the ranks of {len(ranks)} tokens should be 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{len(missing)} of the 256 single bytes are no tokens, the first is {missing[0]}")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that give a token, those with the lowest rank first."""
    found = []
    for token in ranks:
        halves = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(first, second) for first, second in halves if first in ranks and second in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _special_tokens(first: int, added_tokens: Sequence[AddedToken]) -> list[dict[str, object]]:
    named = {token.token_id: token.content for token in added_tokens}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token_ids = {*range(first, first + _NUM_SPECIAL), *(token_id for token_id in named if token_id >= first)}
    return [
        {"id": token_id, "content": named.get(token_id, f"<|reserved_token_{token_id}|>"), "special": True, **flags}
        for token_id in sorted(token_ids)
    ]


def _byte_letters() -> list[str]:
    """Return GPT-2's letter of each byte: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
