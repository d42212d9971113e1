"""Version numbers of weights in a router.

Each engine counts its own weights. A router counts what gives the same bytes: equal weights in engines of one namespace have
one number, whatever each engine calls them. Answers, gauges and records of a router carry its numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.messages import WeightsRecord


class Versions:
    """The numbers given so far; an earlier life of the link wrote `records`."""

    def __init__(self, records: Iterable[WeightsRecord]) -> None:
        self._numbers = {contents: number for record in records for number, contents in record.contents.items()}

    def translated(self, record: WeightsRecord, namespace: str = "") -> tuple[WeightsRecord, dict[int, int]]:
        """Return an engine's record with the router's numbers, and these by the engine's. `namespace`: of an engine whose
        bytes differ from the router's first; contents are named with it."""
        numbers = {
            version: self._number(f"{namespace}.{contents}" if namespace else contents, version)
            for version, contents in sorted(record.contents.items())
        }
        names = {number: contents for contents, number in self._numbers.items()}
        version = numbers[record.version]
        own = msgspec.structs.replace(
            record,
            version=version,
            last_version=max(names),
            ranks=tuple((path, numbers.get(held, version)) for path, held in record.ranks),
            contents={number: names[number] for number in numbers.values()},
        )
        return own, numbers

    def _number(self, contents: str, wanted: int) -> int:
        """Return the number of contents; new ones get the engine's number if it is free."""
        taken = self._numbers.values()
        if contents not in self._numbers:
            self._numbers[contents] = wanted if wanted not in taken else 1 + max(taken)
        return self._numbers[contents]
