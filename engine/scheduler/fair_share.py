"""Order of waiting sequences: fairness between sources, then priority, then arrival. Pure decisions.

Used by the scheduler process (`queues.py`). A **source** is a user: an API key or an address. The next turn goes to the source
with the fewest running sequences (including those that this walk admitted); among equals, to the source that has waited
longest, since its arrival or last turn. Within a source, places in line (shifted by priority) decide **when** a priority is
served; **which** sequence takes the place is decided by turns among the requests of that priority and better ones: the request
with the fewest running sequences goes first.

So a sequence waits for running ones and for one sequence of each other source, whatever their priorities, and no source
starves: between two turns of a source, only sequences that were there at its last turn go before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from engine.scheduler.sequence import Rank, Sequence

_rank = attrgetter("rank")
_FIRST: Rank = (-(1 << 63), 0, 0)  # before all others

# running sequences, waiting since, whether that was a turn, place in line: the lowest goes first
_Turn = tuple[int, Rank, bool, Rank]
_Name = str | int  # of a source or a request; a level
# the next sequence of an owner, and its index in the owner's walk
_Begun = tuple[_Turn, _Name, int, Sequence, Iterator[tuple[_Turn, Sequence]]]


def level_of(priority: int) -> int:
    """Return the level of a priority. Priorities that differ by less than a factor of two share a level, so that there are
    few."""
    return priority.bit_length() if priority > 0 else -priority.bit_length()


class _Owner(msgspec.Struct, eq=False):
    """A request with its `sequences`, or an owner of other owners: a level of a source, a source, or all."""

    num_running: int = 0
    last_turn: Rank = _FIRST
    turn: _Turn | None = None  # as stored in its own owner; None: nothing of it waits
    sequences: list[Sequence] = []
    owned: dict[_Name, _Owner] = {}
    turns: list[tuple[_Turn, _Name]] = []  # of `owned`, in order

    @property
    def is_empty(self) -> bool:
        return not self.num_running and self.turn is None

    def first_rank(self) -> Rank | None:
        if self.sequences:
            return self.sequences[0].rank
        return self.turns[0][0][-1] if self.turns else None

    def turn_of(self, rank: Rank, num_before: int = 0) -> _Turn:
        """Return the turn of a sequence of this rank, after `num_before` others."""
        return self.num_running + num_before, max(rank, self.last_turn), rank <= self.last_turn, rank

    def walk(self) -> Iterator[tuple[_Turn, Sequence]]:
        """Yield the waiting sequences in the order of turns. Nothing may change during the walk."""
        for number, sequence in enumerate(self.sequences):
            yield self.turn_of(sequence.rank, number), sequence
        begun: list[_Begun] = []
        for turn, name in self.turns:
            while begun and begun[0][0] < turn:
                yield self._next(begun)
            walk = self.owned[name].walk()
            heappush(begun, (turn, name, 0, next(walk)[1], walk))
        while begun:
            yield self._next(begun)

    def _next(self, begun: list[_Begun]) -> tuple[_Turn, Sequence]:
        turn, name, num_before, sequence, walk = heappop(begun)
        following = next(walk, None)
        if following is not None:
            next_turn = self.owned[name].turn_of(following[1].rank, num_before + 1)
            heappush(begun, (next_turn, name, num_before + 1, following[1], walk))
        return turn, sequence


class _Source(_Owner, eq=False):
    """A source owns levels; `places` are its sequences in line."""

    places: list[Sequence] = []

    def first_rank(self) -> Rank | None:
        return self.places[0].rank if self.places else None

    def walk(self) -> Iterator[tuple[_Turn, Sequence]]:
        walks = {int(level): owner.walk() for level, owner in sorted(self.owned.items())}
        ahead = {level: found for level, walk in walks.items() if (found := next(walk, None)) is not None}
        for place in self.places:
            allowed = [level for level in ahead if level <= level_of(place.rank[1])] or [min(ahead)]
            level = min(allowed, key=lambda each: ahead[each][0])
            yield ahead[level]
            following = next(walks[level], None)
            if following is None:
                del ahead[level]
            else:
                ahead[level] = following


class FairShare:
    """Waiting sequences, and the number of running ones per source and request."""

    def __init__(self) -> None:
        self._all = _Owner()
        self._last_rank = _FIRST  # the last of all ranks that ever waited

    def push(self, sequence: Sequence) -> None:
        owners = self._owners(sequence)
        for line in _lines(owners):
            insort(line, sequence, key=_rank)
        self._last_rank = max(self._last_rank, sequence.rank)
        _changed(sequence, owners)

    def remove(self, sequence: Sequence) -> None:
        owners = self._owners(sequence)
        for line in _lines(owners):
            del line[bisect_left(line, sequence.rank, key=_rank)]
        _changed(sequence, owners)

    def began(self, sequence: Sequence) -> None:
        """Count a running sequence: its owners have had their turn."""
        owners = self._owners(sequence)
        for owner in owners:
            owner.num_running += 1
            owner.last_turn = self._last_rank
        _changed(sequence, owners)

    def ended(self, sequence: Sequence) -> None:
        """Count a sequence that does not run any more."""
        owners = self._owners(sequence)
        for owner in owners:
            owner.num_running -= 1
        _changed(sequence, owners)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences in the order of turns. Nothing may change meanwhile."""
        return (sequence for _, sequence in self._all.walk())

    def _owners(self, sequence: Sequence) -> list[_Owner]:
        """Return all owners of a sequence: everything, then its source, level and request."""
        source, level, request = _names(sequence)
        found = [self._all, self._all.owned.setdefault(source, _Source())]
        for name in (level, request):
            found.append(found[-1].owned.setdefault(name, _Owner()))
        return found


def _lines(owners: list[_Owner]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the lines a sequence waits in: its source's and its request's."""
    source = owners[1]
    assert isinstance(source, _Source)
    return source.places, owners[-1].sequences


def _changed(sequence: Sequence, owners: list[_Owner]) -> None:
    """Sort its owners again, and forget empty ones."""
    names: tuple[_Name, ...] = _names(sequence)
    for above, owner, name in zip(owners[-2::-1], owners[:0:-1], names[::-1], strict=True):
        if owner.turn is not None:
            del above.turns[bisect_left(above.turns, (owner.turn, name))]
        rank = owner.first_rank()
        owner.turn = None if rank is None else owner.turn_of(rank)
        if owner.turn is not None:
            insort(above.turns, (owner.turn, name))
        if owner.is_empty:
            del above.owned[name]


def _names(sequence: Sequence) -> tuple[str, int, str]:
    shared = sequence.request.shared
    return shared.source or shared.key, level_of(sequence.rank[1]), shared.key
