"""Units of images and video that sequences still have to read, in the order in which they are encoded.

Used by the scheduler process alone. Stores nothing: needs are derived from the state of the sequences, so a sequence that ends
leaves none behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

import msgspec

from engine.process.context import ActorContext
from engine.scheduler.batch_state import BatchState
from engine.scheduler.encoder_cache import EncoderCache
from engine.scheduler.policy import find_prefix
from engine.scheduler.sequence import Sequence, SequenceState
from engine.scheduler.sequence_media import PromptUnit

MAX_LOOK_AHEAD = 8  # waiting sequences with media that are encoded before admission

_rank = attrgetter("rank")


class Need(msgspec.Struct):
    """A unit that some sequence still has to read."""

    unit: PromptUnit
    place: int  # index among all needed units
    is_next: bool  # a sequence cannot continue without it
    request: str  # the first request that needs it, by its group


class UnitNeeds:
    """Finds needed units; counts look-ups in the cache, once for each sequence."""

    def __init__(self, context: ActorContext, batch: BatchState, cache: EncoderCache) -> None:
        self._batch = batch
        self._cache = cache
        self._is_stalled = False
        self._queries = context.counter("mm_cache_queries_total")
        self._hits = context.counter("mm_cache_hits_total")

    def look_up(self) -> dict[bytes, Need]:
        """Return every needed unit once, in the order of the sequences and their prompts."""
        needs: dict[bytes, Need] = {}
        for sequence in self._in_order():
            media = sequence.media
            if media is None or sequence.reader.is_slow:
                continue
            units = media.needed(self._position(sequence))
            if not media.is_counted:
                media.is_counted = True
                self._queries.add(len(units))
                self._hits.add(sum(unit.unit_hash in needs or self._cache.get(unit.unit_hash) is not None for unit in units))
            is_next, request = True, sequence.request.own.group_id or sequence.request.own.request_id
            for unit in units:
                need = needs.setdefault(unit.unit_hash, Need(unit, len(needs), is_next, request))
                need.is_next |= is_next
                is_next = is_next and self._cache.is_readable(unit.unit_hash)
        return needs

    def readers_of(self, unit_hash: bytes) -> list[Sequence]:
        """Return the sequences that still have to read a unit."""
        return [
            sequence
            for sequence in self._batch.sequences.values()
            if sequence.media is not None
            and any(unit.unit_hash == unit_hash for unit in sequence.media.needed(self._position(sequence)))
        ]

    def looked_for_rows(self, has_rows: bool, is_at_work: bool) -> None:
        """Note whether a sequence continues in the next step; `is_at_work`: or may, when the steps in flight return."""
        self._is_stalled = not has_rows and (self._is_stalled or not is_at_work)

    def _in_order(self) -> Iterator[Sequence]:
        """Yield all running sequences and the next waiting ones. While none makes progress, running ones go first, because they
        may hold the slots and blocks that waiting ones need."""
        waiting = islice((sequence for sequence in self._batch.waiting if sequence.media is not None), MAX_LOOK_AHEAD)
        return chain(self._batch.running, waiting) if self._is_stalled else heapq.merge(self._batch.running, waiting, key=_rank)

    def _position(self, sequence: Sequence) -> int:
        """Return the position at which the sequence continues, or would if it were admitted now."""
        if sequence.state is SequenceState.RUNNING:
            return sequence.num_computed
        return find_prefix(sequence, self._batch.pool, self._batch.limits).num_blocks * self._batch.limits.block_size
