"""How few tokens a text can have, from its bytes alone: what cannot fit is refused without being encoded.

Used by `vocabulary.py`, of tokenizers whose tokens have each byte of a text in them. Both bounds hold for any way to cut it:

- a token has at most so many of a certain byte (letters, in long runs, are in few tokens);
- a byte is a part of at least 1 / n of a token, n being the bytes of the longest token that has it.
"""

from __future__ import annotations

from collections.abc import Sequence


class LeastTokens:
    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._singles = {token[0] for token in token_bytes if len(token) == 1}  # others may get lost
        self._longest: dict[int, int] = {}  # by a byte: the length of the longest token that has it
        self._most: dict[int, int] = {}  # by a byte: how often a token has it at most
        for token in sorted(set(token_bytes), key=len, reverse=True):
            for byte in set(token):
                self._longest.setdefault(byte, len(token))

    def of(self, text: bytes) -> int:
        """0 where a byte of it is no token."""
        counts = {byte: text.count(byte) for byte in set(text)}
        if not counts or not counts.keys() <= self._singles:
            return 0
        commonest = max(counts, key=counts.__getitem__)
        by_one = -(-counts[commonest] // self._most_of(commonest))
        return max(by_one, int(sum(count / self._longest[byte] for byte, count in counts.items())))

    def _most_of(self, byte: int) -> int:
        if byte not in self._most:
            self._most[byte] = max(token.count(byte) for token in self._token_bytes)
        return self._most[byte]
