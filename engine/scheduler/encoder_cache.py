"""The encoder cache: which features are in which rows of the encoder arena, and which are evicted next.

Used by the scheduler process alone, which owns the only index. Knows nothing of requests, processes or devices. A unit takes
contiguous rows and is in one of these states, or absent:

    encoding      it has rows, but some parts of the encoder are not dispatched yet
    dispatched    the step that completes it is in flight: that step and later ones may read it
    confirmed     a result says that its features are there
    forgotten     no longer found, but a step in flight still writes or reads its rows

Rows are reused only when no step in flight touches them, because ranks run steps at different times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum

import msgspec


class UnitState(Enum):
    ENCODING = "encoding"
    DISPATCHED = "dispatched"
    CONFIRMED = "confirmed"
    FORGOTTEN = "forgotten"


class CachedUnit(msgspec.Struct, eq=False):
    """A unit's rows [first_row, first_row + num_rows) of the arena."""

    unit_hash: bytes
    first_row: int
    num_rows: int
    state: UnitState = UnitState.ENCODING
    num_users: int = 0  # steps in flight that write or read the rows

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows

    @property
    def is_readable(self) -> bool:
        """Whether a step that is dispatched now finds the features."""
        return self.state in (UnitState.DISPATCHED, UnitState.CONFIRMED)

    @property
    def can_go(self) -> bool:
        return self.state is UnitState.CONFIRMED and not self.num_users


class EncoderCache:
    """The index, the free rows, and eviction in LRU order."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_evictions = 0
        self._units: OrderedDict[bytes, CachedUnit] = OrderedDict()  # the least recently used first
        self._forgotten: set[CachedUnit] = set()
        self._free = RowRuns(num_rows)

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[CachedUnit]:
        return iter(self._units.values())

    @property
    def num_used_rows(self) -> int:
        return self.num_rows - self._free.num_rows

    def get(self, unit_hash: bytes) -> CachedUnit | None:
        return self._units.get(unit_hash)

    def is_readable(self, unit_hash: bytes) -> bool:
        unit = self._units.get(unit_hash)
        return unit is not None and unit.is_readable

    def evictable(self) -> Iterator[CachedUnit]:
        """Return the units that may be evicted, the least recently used first."""
        return (unit for unit in self._units.values() if unit.can_go)

    def begin(self, unit_hash: bytes, num_rows: int, victims: Iterable[CachedUnit]) -> CachedUnit | None:
        """Allocate rows for an absent unit, evicting as few of `victims` (evictable units, in order of preference) as needed.
        Return None, and evict none, if even all of them are not enough."""
        assert unit_hash not in self._units, "a unit is encoded once"
        first_row = self._make_room(num_rows, victims)
        if first_row is None:
            return None
        self._free.take(first_row, first_row + num_rows)
        unit = self._units[unit_hash] = CachedUnit(unit_hash, first_row, num_rows)
        return unit

    def use(self, units: Iterable[CachedUnit]) -> None:
        """Note that a step that writes or reads the units is in flight."""
        for unit in units:
            unit.num_users += 1
            if unit.state is not UnitState.FORGOTTEN:
                self._units.move_to_end(unit.unit_hash)

    def unuse(self, units: Iterable[CachedUnit]) -> None:
        """Note that the step is back, or was given up."""
        for unit in units:
            unit.num_users -= 1
            assert unit.num_users >= 0, "given back twice"
            if not unit.num_users and unit in self._forgotten:
                self._forgotten.remove(unit)
                self._free.give(unit.first_row, unit.end_row)

    def forget(self, unit: CachedUnit) -> None:
        """Remove features that do not exist or must not be used any more."""
        if unit.state is UnitState.FORGOTTEN:
            return
        del self._units[unit.unit_hash]
        unit.state = UnitState.FORGOTTEN
        if unit.num_users:
            self._forgotten.add(unit)
        else:
            self._free.give(unit.first_row, unit.end_row)

    def clear(self) -> None:
        for unit in list(self._units.values()):
            self.forget(unit)

    def _make_room(self, num_rows: int, victims: Iterable[CachedUnit]) -> int | None:
        """Return the first of `num_rows` contiguous free rows, after evictions."""
        first_row = self._free.best(num_rows)
        if first_row is not None:
            return first_row
        free, gone = self._free.copy(), []
        for victim in victims:
            assert victim.can_go, f"cannot evict a unit that is {victim.state.value}"
            gone.append(victim)
            start, end = free.give(victim.first_row, victim.end_row)
            if end - start >= num_rows:
                break
        else:
            return None
        for victim in gone:  # those outside the run stay
            if victim.first_row < start + num_rows and start < victim.end_row:
                self.num_evictions += 1
                self.forget(victim)
        return start


class RowRuns:
    """Free rows as runs [start, end) that do not touch each other."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._end_of = {0: num_rows} if num_rows else {}
        self._start_of = {num_rows: 0} if num_rows else {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._end_of.items())

    def copy(self) -> RowRuns:
        runs = RowRuns(0)
        runs.num_rows, runs._end_of, runs._start_of = self.num_rows, self._end_of.copy(), self._start_of.copy()
        return runs

    def best(self, num_rows: int) -> int | None:
        """Return the start of the shortest run that is long enough."""
        runs = [(end - start, start) for start, end in self._end_of.items() if end - start >= num_rows]
        return min(runs)[1] if runs else None

    def take(self, start: int, end: int) -> None:
        """Take rows from the start of a run."""
        run_end = self._end_of.pop(start)
        del self._start_of[run_end]
        assert end <= run_end
        self.num_rows -= end - start
        if end < run_end:
            self._end_of[end], self._start_of[run_end] = run_end, end

    def give(self, start: int, end: int) -> tuple[int, int]:
        """Free rows; return the run that they are now part of."""
        self.num_rows += end - start
        if start in self._start_of:
            start = self._start_of.pop(start)
        if end in self._end_of:
            end = self._end_of.pop(end)
        self._end_of[start], self._start_of[end] = end, start
        return start, end
