"""Finds stop strings in a text that arrives in pieces, and holds back text that may become one.

Used by `detokenizer.py`. One automaton (Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977) per stop string reads
the text character by character: a match does not depend on how the text was split, the cost per character is constant, and the
longest automaton state is exactly the text that must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The match that is complete first wins; of two that end together, the longer one."""

    __slots__ = ("_active", "_by_first", "_held", "_is_included", "found")

    def __init__(self, stops: Sequence[str], *, is_included: bool) -> None:
        """`stops`: non-empty strings. `is_included`: the stop string itself is part of the text."""
        self.found: str | None = None
        self._by_first: dict[str, list[_Search]] = {}
        for stop in set(stops):
            self._by_first.setdefault(stop[0], []).append(_Search(stop))
        self._active: set[_Search] = set()  # those with a partial match at the end of the text
        self._is_included = is_included
        self._held = ""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, may_stop: bool) -> str:
        """Return the text that `text` releases. If it completes a stop string and `may_stop`, `found` is set and the text
        ends."""
        if not self._held and self._by_first.keys().isdisjoint(text):
            return text
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if not self._active and character not in self._by_first:
                continue
            tried = self._active.union(self._by_first.get(character, ()))
            complete = [search.stop for search in tried if search.advance(character)]
            self._active = {search for search in tried if search.num_matched}
            if complete and may_stop:
                self.found = max(complete, key=len)
                self._held = ""
                return whole[: end if self._is_included else end - len(self.found)]
        num_released = len(whole) - max((search.num_matched for search in self._active), default=0)
        self._held = whole[num_released:]
        return whole[:num_released]

    def release(self) -> str:
        """Release the held text: no more text follows."""
        held, self._held = self._held, ""
        for search in self._active:
            search.num_matched = 0
        self._active = set()
        return held


class _Search:
    """Search for one stop string. The text ends with its first `num_matched` characters, always fewer than all."""

    __slots__ = ("_fallbacks", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallbacks = fallbacks_of(stop)

    def advance(self, character: str) -> bool:
        """Take the next character; return True if it completes the stop string."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._fallbacks[matched]
        matched += self.stop[matched] == character
        is_complete = matched == len(self.stop)
        self.num_matched = self._fallbacks[matched] if is_complete else matched
        return is_complete


@lru_cache(maxsize=512)
def fallbacks_of(pattern: str) -> tuple[int, ...]:
    """For each n, return the length of the longest proper prefix of `pattern[:n]` that is also its suffix. Computed once for
    all sequences with this stop string."""
    table = [0, 0]
    matched = 0
    for character in pattern[1:]:
        while matched and pattern[matched] != character:
            matched = table[matched]
        matched += pattern[matched] == character
        table.append(matched)
    return tuple(table)
