"""Whose turn it is among those who wait: who brings much delays himself, not the others. Decisions only.

Used by the scheduler process for what waits (`queues.py`). First come, first served decides **when** a priority is served: a
walk goes along the places in line. **Who** takes a place is then decided by turns, among all of that priority and better ones:
whose source has the fewest samples running (those that this walk let go before count), and of a source the request that has the
fewest; where these are equal, who has waited for the longest, be that since it came or since its last turn.

So nobody waits for more than what runs and a sample of each other source, and nobody starves: of all that wait, only those that
were there at a source's last turn go before its next one.
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

_Turn = tuple[int, Rank, bool, Rank]  # running, waits since, that was a turn, place in line: the least goes first
_Begun = tuple[_Turn, str, int, Sequence, Iterator[tuple[_Turn, Sequence]]]  # whose next, behind so many others of his


def level_of(priority: int) -> int:
    """Priorities that differ by less than a factor of two share their turns, so that there are few levels."""
    return priority.bit_length() if priority > 0 else -priority.bit_length()


class _Owner(msgspec.Struct, eq=False):
    """A request, whose samples wait in `sequences`; or who has several of those, or the whole level."""

    num_running: int = 0
    last_turn: Rank = _FIRST
    turn: _Turn | None = None  # as those above know it; None: nothing of it waits
    sequences: list[Sequence] = []
    owned: dict[str, _Owner] = {}
    turns: list[tuple[_Turn, str]] = []  # of `owned`, in order

    @property
    def is_empty(self) -> bool:
        return not self.num_running and self.turn is None

    def first_rank(self) -> Rank | None:
        if self.sequences:
            return self.sequences[0].rank
        return self.turns[0][0][-1] if self.turns else None

    def turn_of(self, rank: Rank, num_before: int = 0) -> _Turn:
        """Of a sample of this rank, behind `num_before` others."""
        return self.num_running + num_before, max(rank, self.last_turn), rank <= self.last_turn, rank

    def walk(self) -> Iterator[tuple[_Turn, Sequence]]:
        """What waits, in the order of turns. Nothing may change meanwhile."""
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


class Turns:
    """What waits, and how many run of each source and request."""

    def __init__(self) -> None:
        self._levels: dict[int, _Owner] = {}
        self._last_rank = _FIRST  # of all that ever waited

    def push(self, sequence: Sequence) -> None:
        owners = self._owners(sequence)
        insort(owners[-1].sequences, sequence, key=_rank)
        self._last_rank = max(self._last_rank, sequence.rank)
        self._changed(sequence, owners)

    def remove(self, sequence: Sequence) -> None:
        owners = self._owners(sequence)
        del owners[-1].sequences[bisect_left(owners[-1].sequences, sequence.rank, key=_rank)]
        self._changed(sequence, owners)

    def began(self, sequence: Sequence) -> None:
        """It runs: its owners have had their turn."""
        owners = self._owners(sequence)
        for owner in owners:
            owner.num_running += 1
            owner.last_turn = self._last_rank
        self._changed(sequence, owners)

    def ended(self, sequence: Sequence) -> None:
        """It runs no more."""
        owners = self._owners(sequence)
        for owner in owners:
            owner.num_running -= 1
        self._changed(sequence, owners)

    def along(self, places: list[Sequence]) -> Iterator[Sequence]:
        """All that wait, in their turns; `places` are the same in line."""
        walks = {level: owner.walk() for level, owner in sorted(self._levels.items())}
        if len(walks) == 1:
            yield from (sequence for walk in walks.values() for _, sequence in walk)
            return
        ahead = {level: found for level, walk in walks.items() if (found := next(walk, None)) is not None}
        for place in places:
            allowed = [level for level in ahead if level <= level_of(place.rank[1])] or [min(ahead)]
            level = min(allowed, key=lambda each: ahead[each][0])
            yield ahead[level][1]
            following = next(walks[level], None)
            if following is None:
                del ahead[level]
            else:
                ahead[level] = following

    def _owners(self, sequence: Sequence) -> list[_Owner]:
        """Of its level, its source and its request."""
        owners = [self._levels.setdefault(level_of(sequence.rank[1]), _Owner())]
        for name in _names(sequence):
            owners.append(owners[-1].owned.setdefault(name, _Owner()))
        return owners

    def _changed(self, sequence: Sequence, owners: list[_Owner]) -> None:
        """Put its owners into their order again, and forget those of which nothing is here."""
        for above, owner, name in zip(owners[-2::-1], owners[:0:-1], _names(sequence)[::-1], strict=True):
            if owner.turn is not None:
                del above.turns[bisect_left(above.turns, (owner.turn, name))]
            rank = owner.first_rank()
            owner.turn = None if rank is None else owner.turn_of(rank)
            if owner.turn is not None:
                insort(above.turns, (owner.turn, name))
            if owner.is_empty:
                del above.owned[name]
        if not owners[0].owned:
            del self._levels[level_of(sequence.rank[1])]


def _names(sequence: Sequence) -> tuple[str, str]:
    request = sequence.request
    key = request.key or request.request_id
    return request.source or key, key
