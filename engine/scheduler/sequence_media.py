"""Parts of a prompt that are not causal text: units of images and video, and tokens that see later positions.

Used by the scheduler process alone; created at admission, None for plain text. Pure decisions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

import msgspec

from engine.block_keys import BlockExtras
from engine.messages import MediaItem, SequenceRequest
from engine.scheduler.chunk_cuts import Span, balanced_cut, last_cut, merged, uncut

NOT_SENT = -1
UNIT_BYTES = 96  # most bytes of a unit in a SlotStart: eight integers, its hash, its row
BOUNDS_BYTES = 8  # of a prompt token there: its first and last visible position


class PromptUnit(msgspec.Struct, frozen=True):
    """A unit; the tokens [start, end) are rows of its features."""

    unit_hash: bytes
    start: int
    end: int
    item: MediaItem
    index: int  # of the unit in its item

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class SequenceMedia:
    """The units of one prompt, its legal cuts, and what the ranks know of it."""

    __slots__ = ("_ends", "_soft", "_whole", "end", "extras", "is_counted", "num_start_bytes", "sent_rows", "units")

    def __init__(self, units: list[PromptUnit], extras: BlockExtras, num_bounds: int, can_cut_units: bool) -> None:
        spans = [(unit.start, unit.end) for unit in units]
        self.units = units
        self.extras = extras
        self.num_start_bytes = UNIT_BYTES * len(units) + BOUNDS_BYTES * num_bounds
        self.sent_rows = array("i")  # first row of each unit, as known to the rank that has the slot
        self.is_counted = False  # its look-ups are counted in the metrics
        self._ends = [end for _, end in spans]
        self._soft: list[Span] = spans if can_cut_units else []
        self._whole: list[Span] = merged(extras.forward_spans + ([] if can_cut_units else spans))
        self.end = max([0, *self._ends[-1:], *(end for _, end in self._whole[-1:])])  # all tokens behind it are text

    @classmethod
    def of(cls, request: SequenceRequest, extras: BlockExtras | None, can_cut_units: bool) -> SequenceMedia | None:
        """Return None for causal text."""
        if extras is None or not (request.prompt.units or request.shared.mask_bounds):
            return None
        units = [
            PromptUnit(
                request.shared.media[unit.item].unit_hashes[unit.index],
                unit.start,
                unit.start + unit.num_tokens,
                request.shared.media[unit.item],
                unit.index,
            )
            for unit in request.prompt.units
        ]
        return cls(units, extras, len(request.shared.mask_bounds) // BOUNDS_BYTES, can_cut_units)

    @property
    def longest_whole(self) -> Span:
        """The longest span that must be in one chunk."""
        return max(self._whole, key=lambda span: span[1] - span[0], default=(0, 0))

    def overlapping(self, start: int, end: int) -> range:
        """Return the indexes of the units with tokens in [start, end)."""
        first = last = bisect_right(self._ends, start)
        while last < len(self.units) and self.units[last].start < end:
            last += 1
        return range(first, last)

    def needed(self, position: int) -> list[PromptUnit]:
        """Return the units with tokens from `position` on."""
        return self.units[bisect_right(self._ends, position) :]

    def readable_end(self, start: int, end: int, is_readable: Callable[[bytes], bool]) -> int:
        """Return the start of the first unit in [start, end) with features that a step would not find; at least `start`."""
        for index in self.overlapping(start, end):
            if not is_readable(self.units[index].unit_hash):
                return max(start, self.units[index].start)
        return end

    def num_hit_blocks(self, num_blocks: int, block_size: int) -> int:
        """Return how many of the first `num_blocks` blocks may come from the cache: a hit must end where a chunk could end."""
        while num_blocks:
            cut = last_cut(0, num_blocks * block_size, self._whole)
            if cut == num_blocks * block_size:
                break
            num_blocks = cut // block_size
        return num_blocks

    def chunk_end(self, start: int, end: int, target: int, max_tokens: int, budget: int) -> int:
        """Return the end of the chunk of [start, end) that begins at `start`; `start`: there is none. `target`: target size of
        chunks. `max_tokens`: limit for a chunk that takes a unit whole. `budget`: remaining tokens of the step."""
        soft = uncut(start, self._soft, max_tokens)
        spans = [span for span in (*self._whole, *soft) if span[1] > start and span[1] - span[0] > target]
        long = min(spans, default=(end, end))
        if long[0] <= start:
            cut = long[1]
        else:
            cut = balanced_cut(start, min(end, long[0]), target, self._whole, soft)
        if cut > start + budget:
            cut = last_cut(start, start + budget, self._whole, uncut(start, soft, budget))
        return cut
