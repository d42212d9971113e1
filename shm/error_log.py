"""The log of distinct errors in the counters file: text, count, and first and last time of each.

Each actor has its own section, so each entry has one writer. A repeated error costs two stores, so an error in a loop neither
floods the log nor gets lost.
"""

from __future__ import annotations

import time

import msgspec

from shm._native import LAYOUT
from shm.layout import StructView, size_of

ENTRY_BYTES = size_of("ErrorEntry")
ENTRIES_PER_ACTOR = 16
OVERFLOW_TEXT = "(further distinct errors, not kept)"
_MAX_TEXT_BYTES = LAYOUT["ErrorEntry"]["text"][1] - 1


class ErrorSnapshot(msgspec.Struct, frozen=True):
    actor: str
    text: str
    count: int
    first_ns: int  # CLOCK_REALTIME
    last_ns: int


class ErrorLog:
    """All sections; a process records into its own only, and the supervisor into that of an actor while it is dead."""

    def __init__(self, buffer: memoryview, offset: int, actors: list[str]) -> None:
        section_bytes = ENTRIES_PER_ACTOR * ENTRY_BYTES
        self._sections = {
            actor: [
                StructView("ErrorEntry", buffer, offset + index * section_bytes + entry * ENTRY_BYTES)
                for entry in range(ENTRIES_PER_ACTOR)
            ]
            for index, actor in enumerate(actors)
        }

    def record(self, actor: str, text: str) -> None:
        """Count an error of `actor`. Long text is cut; if no entry is left, the error counts in the last one."""
        text = text.replace("\0", " ").encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore")
        now_ns = time.time_ns()
        *entries, overflow = self._sections[actor]
        for entry in entries:
            count = entry.word("count")
            if count == 0 or entry.text("text") == text:
                break
        else:
            entry, count, text = overflow, overflow.word("count"), OVERFLOW_TEXT
        if count == 0:
            entry.set_text("text", text)
            entry.set_word("first_ns", now_ns)
        entry.set_word("last_ns", now_ns)
        # SYNC: the store-release pairs with the load-acquire of count in entries().
        entry.set_word("count", count + 1)

    def entries(self) -> list[ErrorSnapshot]:
        """Return the recorded errors, the latest first."""
        found = []
        for actor, section in self._sections.items():
            for entry in section:
                # SYNC: the load-acquire pairs with the store-release of count in record().
                count = entry.word("count")
                if count:
                    found.append(ErrorSnapshot(actor, entry.text("text"), count, entry.word("first_ns"), entry.word("last_ns")))
        return sorted(found, key=lambda error: -error.last_ns)
