"""Detects an answer that repeats itself: its last tokens are one pattern several times.

Used by `text_stream.py`, one `Repetition` for each open sequence that requests it. The result after n tokens depends only on
these tokens, so a replay finds the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.messages import RepetitionLimits


class Repetition:
    """For each pattern size, counts how many of the last tokens equal the token `size` positions before: a pattern that occurs
    `min_count` times means `size * (min_count - 1)` equal tokens in a row."""

    __slots__ = ("_last", "_limits", "_min_tokens", "_num_equal", "is_found", "num_tokens")

    def __init__(self, limits: RepetitionLimits, min_tokens: int) -> None:
        """Ignore repetitions that are complete before `min_tokens` tokens."""
        self.is_found = False
        self.num_tokens = 0
        self._limits = limits
        self._min_tokens = min_tokens
        self._last: deque[int] = deque(maxlen=limits.max_pattern_size)  # the newest first
        self._num_equal = [0] * limits.max_pattern_size  # of size 1, 2, ...

    def push(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens count: all, or those up to the one that completes a repetition."""
        if self.is_found:
            return 0
        for place, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            for index, earlier in enumerate(self._last):
                self._num_equal[index] = self._num_equal[index] + 1 if earlier == token_id else 0
            self._last.appendleft(token_id)
            if self.num_tokens >= self._min_tokens and self._is_repeated():
                self.is_found = True
                return place
        return len(token_ids)

    def _is_repeated(self) -> bool:
        sizes = range(self._limits.min_pattern_size, self._limits.max_pattern_size + 1)
        return any(self._num_equal[size - 1] >= size * (self._limits.min_count - 1) for size in sizes)
