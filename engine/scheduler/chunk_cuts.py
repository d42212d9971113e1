"""Cuts of a prompt with media into chunks. Pure decisions.

A cut at position p ends one chunk and begins the next. No cut may lie strictly inside a **span** [first, end): a unit (an
image, or a temporal grid row of a video), or tokens that see later positions. Spans come in lists, each sorted and without
overlap.

Among the cuts with the fewest chunks, the one with the smallest largest chunk wins: a step takes as long as its tokens, and
other requests in these steps wait for the longest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Span = tuple[int, int]


def last_cut(start: int, end: int, *lists: Sequence[Span]) -> int:
    """Return the last legal cut in (start, end]; `start`: there is none."""
    before = end + 1
    while start < end < before:
        before = end
        for spans in lists:
            index = bisect_left(spans, (end, 0)) - 1  # the last that begins before
            if index >= 0 and end < spans[index][1]:
                end = spans[index][0]
    return max(start, end)


def balanced_cut(start: int, end: int, max_tokens: int, *lists: Sequence[Span]) -> int:
    """Return the end of the first chunk of [start, end), with at most `max_tokens`; `start`: impossible."""
    num_chunks = _num_chunks(start, end, max_tokens, *lists)
    if not num_chunks:
        return start
    least, most = -(-(end - start) // num_chunks), max_tokens
    while least < most:
        middle = (least + most) // 2
        if 0 < _num_chunks(start, end, middle, *lists) <= num_chunks:
            most = middle
        else:
            least = middle + 1
    return last_cut(start, min(end, start + most), *lists)


def uncut(start: int, spans: Sequence[Span], max_tokens: int) -> list[Span]:
    """Return the spans that end after `start` and fit a chunk as a whole, each cut to begin at `start` or later."""
    return [(max(start, first), end) for first, end in spans if end > start and end - max(start, first) <= max_tokens]


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, with overlapping ones merged."""
    found: list[Span] = []
    for first, end in sorted(spans):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def _num_chunks(start: int, end: int, max_tokens: int, *lists: Sequence[Span]) -> int:
    """Return the smallest number of chunks, each as long as possible; 0: impossible."""
    count = 0
    while start < end:
        cut = last_cut(start, min(end, start + max_tokens), *lists)
        if cut == start:
            return 0
        start = cut
        count += 1
    return count
