"""Dispatch of steps to the ranks: builds a `Step` from a plan, and tracks the steps in flight.

Used by the scheduler process alone, the only writer of the broadcast ring. Up to two steps are in flight: while a rank runs
step n, step n + 1 is already in its ring, so that it never waits for the scheduler.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate

import msgspec

from engine.messages import ClearWeights, CompileGrammar, EncoderCall, LoadWeights, SlotStart, Step
from engine.process.outbox import BackloggedOutbox
from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_pool import NO_BLOCK
from engine.scheduler.encoder_cache import CachedUnit, EncoderCache
from engine.scheduler.encoder_work import EncoderWork
from engine.scheduler.policy import SequenceChunk, source_of
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_media import NOT_SENT
from engine.scheduler.step_cost import StepLoad
from shm.broadcast import BroadcastWriter

MAX_STEPS_IN_FLIGHT = 2
STEP_ID_BITS = 40  # below the scheduler's epoch: step ids never repeat, and every later one is greater


class StepInFlight(msgspec.Struct):
    """A dispatched step without its result; its chunks are in slot order."""

    step_id: int
    rows: list[SequenceChunk]
    num_tokens: int
    load: StepLoad
    has_encoder_parts: bool = False


class Dispatcher:
    """The broadcast ring, messages that did not fit, and the steps in flight."""

    def __init__(self, writer: BroadcastWriter, epoch: int, encoder: EncoderWork | None = None) -> None:
        """`encoder`: for models that take images."""
        self._encoder = encoder
        self._find = (EncoderCache(0) if encoder is None else encoder.cache).get
        self._next_step_id = (epoch << STEP_ID_BITS) + 1
        self._flight: deque[StepInFlight] = deque()
        self._outbox = BackloggedOutbox(writer.try_send)
        self.on_lost: Callable[[], None] = lambda: None  # called if messages on their way may have been lost

    @property
    def num_in_flight(self) -> int:
        return len(self._flight)

    @property
    def has_room(self) -> bool:
        """Whether another step may be dispatched."""
        return len(self._flight) < MAX_STEPS_IN_FLIGHT and not self.has_unsent

    @property
    def has_unsent(self) -> bool:
        return len(self._outbox) > 0

    def dispatch(
        self,
        rows: list[SequenceChunk],
        batch: BatchState,
        now_ns: int,
        rank_group_epoch: int = 0,
        parts: EncoderCall | None = None,
    ) -> StepInFlight:
        """Grow the block tables, advance the sequences, and send the rows, after these parts of the encoder, as a step of this
        epoch of the rank group."""
        rows.sort(key=_slot)
        num_tokens = sum(row.num_tokens for row in rows)
        flight = StepInFlight(self._next_step_id, rows, num_tokens, _load_of(rows), parts is not None)
        step = build_step(flight.step_id, rows, batch, now_ns, rank_group_epoch)
        read = add_units(step, rows, self._find) if batch.num_with_media else []
        if self._encoder is not None:
            step.encoder = parts
            self._encoder.dispatched(flight.step_id, read, parts)
        self._next_step_id += 1
        self._flight.append(flight)
        self.send(step)
        return flight

    def send(self, message: Step | LoadWeights | ClearWeights | CompileGrammar) -> None:
        """Send a message to every rank, after those sent before."""
        self._outbox.post(message)
        self._outbox.flush()

    def flush(self) -> int:
        """Send messages again that did not fit the ring; return the number of records sent."""
        return self._outbox.flush()

    def deadline_ns(self) -> int:
        """Return the time of the next flush; 0 if nothing waits."""
        return self._outbox.deadline_ns()

    def complete(self, step_id: int) -> StepInFlight | None:
        """Remove the step of a result from the flight and return it; None if the step was given up or belongs to an earlier
        scheduler. Results come in the order of the steps."""
        if not self._flight or self._flight[0].step_id != step_id:
            return None
        return self._flight.popleft()

    def is_in_flight(self, step_id: int) -> bool:
        return any(flight.step_id == step_id for flight in self._flight)

    def give_up_flight(self) -> int:
        """Forget the steps in flight and return how many there were; results that still arrive are dropped."""
        num_lost = len(self._flight)
        self._flight.clear()
        if self._encoder is not None:
            self._encoder.rollback()
        self._outbox.clear()
        self.on_lost()
        return num_lost


def build_step(step_id: int, rows: list[SequenceChunk], batch: BatchState, now_ns: int, rank_group_epoch: int = 0) -> Step:
    """Return the `Step` of these chunks (in slot order), and count their sequences as computed that far."""
    starts: list[SlotStart] = []
    columns = [array("i") for _ in range(7)]
    slots, start, num_tokens, block_slots, block_indexes, block_ids, block_tables = columns
    block_size = batch.limits.block_size
    first_tables = [0, *accumulate(group.num_tables for group in batch.limits.groups)]
    is_sampling, is_following, wants_drafts, num_drafts = bytearray(), bytearray(), bytearray(), array("i")
    states = array("i")
    for row in rows:
        sequence = row.sequence
        end = row.end
        has_room = end <= len(sequence.tables[-1]) * block_size  # the shortest table
        new = [] if has_room else batch.grow(sequence, end)
        if not sequence.is_started:
            starts.append(_slot_start(sequence, batch))
        else:
            for group, index in new:
                for table, page in enumerate(batch.pool.pages(sequence.tables[group][index]), first_tables[group]):
                    block_slots.append(sequence.slot)
                    block_indexes.append(index)
                    block_ids.append(page)
                    block_tables.append(table)
        slots.append(sequence.slot)
        start.append(row.start)
        num_tokens.append(row.num_tokens)
        is_sampling.append(row.is_sampling)
        is_following.append(sequence.num_ahead > 0)
        num_drafts.append(row.num_drafts)
        wants_drafts.append(sequence.num_wanted > 0)
        if sequence.states is not None:
            use = batch.dispatch_states(sequence, row.start + row.num_tokens)
            states.extend((use.read, use.position, use.write, use.keep, use.keep_at))
        sequence.num_computed = row.start + row.num_tokens
        sequence.num_unknown += row.is_sampling
        sequence.num_ahead += row.num_drafts
        sequence.num_in_flight += 1
    ended, batch.ended = batch.ended, []
    slots_, start_, num_tokens_, block_slots_, block_indexes_, block_ids_, block_tables_ = (each.tobytes() for each in columns)
    return Step(
        step_id,
        starts,
        slots_,
        start_,
        num_tokens_,
        bytes(is_sampling),
        block_slots_,
        block_indexes_,
        block_ids_,
        now_ns,
        rank_group_epoch,
        is_following=bytes(is_following) if any(is_following) else b"",
        num_drafts=num_drafts.tobytes() if any(num_drafts) else b"",
        ended=array("i", [number for each in ended for number in each]).tobytes(),
        generation=batch.pool.prefix_cache.generation,
        wants_drafts=bytes(wants_drafts) if any(wants_drafts) else b"",
        block_tables=block_tables_ if any(block_tables) else b"",
        states=states.tobytes(),
    )


def add_units(step: Step, rows: list[SequenceChunk], find: Callable[[bytes], CachedUnit | None]) -> list[CachedUnit]:
    """Add to a step the media and masks of its prompts, and the places of the features that its rows read (`find` finds them by
    hash). Return the units that are read."""
    starts = {start.slot: start for start in step.starts}
    slots, indexes, first_rows = (array("i") for _ in range(3))
    read: dict[bytes, CachedUnit] = {}
    for row in rows:
        media, slot = row.sequence.media, row.sequence.slot
        if media is None:
            continue
        start = starts.get(slot)
        if start is not None:
            media.sent_rows = array("i", [NOT_SENT]) * len(media.units)
        for index in media.overlapping(row.start, row.start + row.num_tokens):
            unit = find(media.units[index].unit_hash)
            assert unit is not None, f"{row.sequence.request.own.request_id} reads unit {index}, which is not cached"
            read[unit.unit_hash] = unit
            if media.sent_rows[index] == unit.first_row:
                continue
            media.sent_rows[index] = unit.first_row
            if start is None:
                slots.append(slot)
                indexes.append(index)
                first_rows.append(unit.first_row)
        if start is not None:
            start.units, start.mask_bounds = row.sequence.request.prompt.units, row.sequence.request.shared.mask_bounds
            start.unit_rows = media.sent_rows.tobytes()
            start.unit_hashes = tuple(unit.unit_hash for unit in media.units)
    step.unit_slots, step.unit_indexes, step.unit_rows = slots.tobytes(), indexes.tobytes(), first_rows.tobytes()
    return list(read.values())


def _slot_start(sequence: Sequence, batch: BatchState) -> SlotStart:
    sequence.is_started = True
    block_ids, *others = _tables_of(sequence, batch)
    adapter = sequence.request.shared.options.adapter
    return SlotStart(
        sequence.slot,
        sequence.request.own.request_id,
        sequence.token_ids.tobytes(),
        sequence.num_prompt_tokens,
        sequence.request.sampling,
        block_ids,
        sequence.wants_prompt_logprobs,
        max_total_tokens=sequence.max_total_tokens,
        second_start=sequence.request.prompt.second_start,
        adapter_slot=-1 if adapter is None else adapter.slot,
        source=source_of(sequence),
        other_block_ids=tuple(others),
    )


def _tables_of(sequence: Sequence, batch: BatchState) -> Iterator[bytes]:
    """Yield the block tables of a sequence, group by group."""
    for table, group in zip(sequence.tables, batch.limits.groups, strict=True):
        if group.num_tables == 1:
            yield array("i", table).tobytes()
            continue
        pages = [batch.pool.pages(block_id) if block_id else (NO_BLOCK,) * group.num_tables for block_id in table]
        for number in range(group.num_tables):
            yield array("i", [page[number] for page in pages]).tobytes()


def _load_of(rows: list[SequenceChunk]) -> StepLoad:
    """Return the load of chunks that are not dispatched yet."""
    load = StepLoad()
    for row in rows:
        if row.num_tokens > 1 or row.is_prefill:
            load.add_prompt(row.start, row.num_tokens)
        else:
            load.num_decodes += 1
    return load


def _slot(row: SequenceChunk) -> int:
    return row.sequence.slot
