"""Lower bound of a text's tokens, from its bytes alone: a text that cannot fit is rejected without being encoded.

Used by `vocabulary.py`, for tokenizers that keep each byte of a text in some token. Both bounds hold for any tokenization:

- a token contains a certain byte at most so many times (long runs of letters are in few tokens);
- a byte counts as at least 1 / n of a token, where n is the length of the longest token with this byte.
"""

from __future__ import annotations

from collections.abc import Sequence


class LeastTokens:
    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._singles = {token[0] for token in token_bytes if len(token) == 1}  # other bytes may be lost
        self._longest: dict[int, int] = {}  # by byte: length of the longest token that contains it
        self._most: dict[int, int] = {}  # by byte: largest number of times a token contains it
        for token in sorted(set(token_bytes), key=len, reverse=True):
            for byte in set(token):
                self._longest.setdefault(byte, len(token))

    def of(self, text: bytes) -> int:
        """Return the bound; 0 if some byte is not a token."""
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
