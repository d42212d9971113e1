"""Media of a slot's prompt: positions of their tokens on three axes, and the rows of their features.

Pure: made from a SlotStart, used by the step inputs for the rows of a chunk. Everything is a function of a token's place in the
prompt, so chunks need no cursor.

Positions (Wang et al. 2024, "Qwen2-VL"): text counts equally on all three axes; the token of a unit in row r and column c is at
(base + time, base + r, base + c); text continues after the largest number so far.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.block_keys import bounds_of_units
from engine.messages import MediaUnit, SlotStart
from workers.engine.batch_slots import BatchSlots

NO_ROW = -1


class PromptMedia(msgspec.Struct, eq=False):
    """Unit u of a prompt has the tokens [starts[u], ends[u]), and its features begin at `rows[u]` of the encoder arena (NO_ROW:
    not stored). Text in between is at its place + shifts[number of units before it], on all axes."""

    hashes: tuple[bytes, ...]
    starts: np.ndarray  # int32 [units], like the following
    ends: np.ndarray
    bases: np.ndarray
    times: np.ndarray
    widths: np.ndarray
    breaks: np.ndarray  # tokens between two rows of tokens, which are text
    rows: np.ndarray
    shifts: np.ndarray  # int32 [units + 1]

    @staticmethod
    def of(message: SlotStart) -> PromptMedia | None:
        """Return the media of a prompt, or None for text."""
        units = message.units
        if not units:
            return None
        bases, shifts = _bases_and_shifts(units)
        given = np.frombuffer(message.unit_rows, np.int32)
        starts = np.array([unit.start for unit in units], np.int32)
        ends = starts + np.array([unit.num_tokens for unit in units], np.int32)
        assert (starts[1:] >= ends[:-1]).all(), f"units overlap: {units}"
        assert ends[-1] <= message.num_prompt_tokens, f"units beyond {message.num_prompt_tokens} prompt tokens: {units[-1]}"
        return PromptMedia(
            message.unit_hashes,
            starts,
            ends,
            bases,
            np.array([unit.time for unit in units], np.int32),
            np.array([unit.width for unit in units], np.int32),
            np.array([unit.num_tokens > unit.height * unit.width for unit in units], np.int32),
            given.copy() if len(given) else np.full(len(units), NO_ROW, np.int32),
            shifts,
        )

    @property
    def end(self) -> int:
        """Return the end of the last unit; text follows."""
        return int(self.ends[-1])

    @property
    def last_shift(self) -> int:
        return int(self.shifts[-1])

    def overlapping(self, begin: int, end: int) -> range:
        """Return units with tokens in [begin, end)."""
        return range(int(np.searchsorted(self.ends, begin, "right")), int(np.searchsorted(self.starts, end, "left")))

    def place(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for the tokens [begin, end) their positions on the axes time, height and width, int32 [3, n], and the arena
        rows of their features, NO_ROW where there are none, int32 [n]."""
        places = np.arange(begin, end, dtype=np.int32)
        before = np.searchsorted(self.starts, places, "right")  # units that have begun
        units = np.maximum(before - 1, 0)
        within = places - self.starts[units]
        is_text = (before == 0) | (places >= self.ends[units])
        in_row, in_column = np.divmod(within, self.widths[units] + self.breaks[units])
        parts = np.stack([self.times[units], in_row, in_column]) + self.bases[units]
        # a unit that has ended is one of those before the text after it
        axes = np.where(is_text, places + self.shifts[before], parts).astype(np.int32)
        rows = self.rows[units]
        is_text |= in_column == self.widths[units]
        return axes, np.where(is_text | (rows == NO_ROW), NO_ROW, rows + within).astype(np.int32)


class MediaSlots:
    """Media of every batch slot's prompt (`BatchSlots.add_part`)."""

    def __init__(self, slots: BatchSlots) -> None:
        self._slots = slots
        self.prompts = slots.register("media", None, dtype=object)  # PromptMedia
        self.ends = slots.register("media_ends", 0)  # a prompt is text from here on
        self.text_shifts = slots.register("text_shifts", 0)  # added to positions from there on
        slots.add_part(self)

    def start(self, message: SlotStart) -> None:
        media = self.prompts[message.slot] = PromptMedia.of(message)
        if media is not None:
            self.ends[message.slot], self.text_shifts[message.slot] = media.end, media.last_shift
            bounds = np.array(bounds_of_units(message.units), np.int32).reshape(-1, 2)
            if len(bounds) and not message.mask_bounds:
                self._slots.mask_bounds[message.slot], self._slots.bounds_ends[message.slot] = bounds, len(bounds)

    def set_unit_rows(self, slots: np.ndarray, units: np.ndarray, rows: np.ndarray) -> None:
        """Set the first rows of units of slots (int32 [n] each) in the encoder arena, or NO_ROW."""
        for slot, unit, row in zip(slots.tolist(), units.tolist(), rows.tolist(), strict=True):
            self.prompts[slot].rows[unit] = row


def _bases_and_shifts(units: tuple[MediaUnit, ...]) -> tuple[np.ndarray, np.ndarray]:
    bases, shifts = [], [0]
    at = position = base = 0  # end of the last unit: place and position of the next token
    for unit in units:
        position += unit.start - at
        if not unit.is_continued:
            base = position
        position = max(position, base + max(unit.time, unit.height - 1, unit.width - 1) + 1)
        at = unit.start + unit.num_tokens
        bases.append(base)
        shifts.append(position - at)
    return np.array(bases, np.int32), np.array(shifts, np.int32)
