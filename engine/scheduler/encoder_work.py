"""Plans the encoder's work: which units are needed, which pixels are requested, and which parts of which units a step runs.

Used by the scheduler process alone. Units that running sequences and the next waiting ones need are encoded once each, in the
order of the sequences, by one call at a time. A call is cut into parts, so that the encoder's work in a step is limited as its
tokens are. Only later steps read what a step completes: a prompt chunk in the same step would make streams wait for both.

If the arena has no room for a unit that a sequence waits for, units that no sequence needs are evicted first, starting with the
least recently used, then units of later sequences, starting with the last one: so the first sequence always progresses.
Sequences do not hold rows; which of them need a unit is looked up when a call begins (`unit_needs.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, takewhile

import msgspec

from engine.messages import Encode, EncoderCall, Pixels, PixelsFailed
from engine.process.context import ActorContext
from engine.scheduler.batch_state import BatchState
from engine.scheduler.encoder_cache import CachedUnit, EncoderCache, UnitState
from engine.scheduler.encoder_cost import EncoderCost
from engine.scheduler.pixels import PixelRequest, PixelRequests
from engine.scheduler.sequence_media import PromptUnit
from engine.scheduler.unit_needs import Need, UnitNeeds

MAX_CALL_STEPS = 4  # most steps for a call with several units: with more the first unit would wait for the last
MAX_CALL_UNITS = 64
MAX_LOSSES = 5  # consecutive losses of one unit before its sequences fail

CALL_BYTES = 64 + 192 * MAX_CALL_UNITS  # most bytes of a call in a Step
RESULT_UNIT_BYTES = 256  # of a unit in a StepResult, with the reason why it is missing


class _Call(msgspec.Struct):
    """The call in progress."""

    message: EncoderCall
    units: list[CachedUnit]
    parts: list[float]  # cost of each part


class _StepPart(msgspec.Struct):
    """Encoder work of a step in flight."""

    read: list[CachedUnit]
    touched: list[CachedUnit]  # units with rows that it reads or writes
    completed: list[CachedUnit] = []
    pixels: list[PixelRequest] = []  # pixels that its parts are the first to read


class EncoderWork:
    """The cache, the call in progress, and how steps in flight use both."""

    def __init__(self, context: ActorContext, batch: BatchState) -> None:
        config = context.config
        self.cache = EncoderCache(config.encoder_cache_size)
        self.needs = UnitNeeds(context, batch, self.cache)
        self._pixels = PixelRequests(context)
        self._batch = batch
        self._cost = EncoderCost(config)
        self._max_rows = config.max_num_batched_encoder_embeds
        self._call: _Call | None = None
        self._lent: list[PixelRequest] = []  # by the call in progress, until its first parts are dispatched
        self._parts: dict[int, _StepPart] = {}  # by step
        self._losses: dict[bytes, int] = {}
        self._is_without_room = False  # pixels are ready, but no rows are free for any of them
        self._num_calls = context.epoch << 32
        names = ("calls", "units", "rows", "losses", "evictions")
        self._cells = {name: context.counter(f"encoder_{name}_total") for name in names}
        self._usage = context.counter("encoder_cache_usage_perc")
        self._num_cached = context.counter("num_encoder_cache_units")

    @property
    def is_idle(self) -> bool:
        return not (self._batch.num_with_media or self._call or self._parts or len(self._pixels))

    @property
    def deadline_ns(self) -> int:
        return self._pixels.deadline_ns

    def advance(self, now_ns: int) -> int:
        """Request pixels of needed units, and release and cancel those no longer needed. Return the number of messages sent."""
        if not self.is_idle:
            needs = self.needs.look_up()
            if self._call is not None and not any(unit.unit_hash in needs for unit in self._call.units):
                self._drop_call()
            self._pixels.keep(needs)
            self._losses = {unit_hash: count for unit_hash, count in self._losses.items() if unit_hash in needs}
            if self._is_without_room:
                missing = (unit_hash for unit_hash in needs if self.cache.get(unit_hash) is None)
                self._pixels.make_way(next(missing, b""))
            for need in self._turn_of(needs):
                self._pixels.want(need.unit, need.request, now_ns)
            self._show()
        return self._pixels.flush()

    def _turn_of(self, needs: Mapping[bytes, Need]) -> Iterator[Need]:
        """Yield the needs for which pixels are requested now: as many per request as one call takes, and in total as many as
        the arena has room for. So a request that waits long (for a video to be decoded) takes no room in the arena or the slab
        from later requests."""
        num_asked: Counter[str] = Counter()  # rows by request
        num_rows = 0
        for need in needs.values():
            is_absent = self.cache.get(need.unit.unit_hash) is None
            if is_absent and num_asked[need.request] >= MAX_CALL_STEPS * self._max_rows:
                continue
            num_rows += need.unit.num_rows
            if num_rows > self.cache.num_rows:
                return
            if is_absent:
                num_asked[need.request] += need.unit.num_rows
                yield need

    # ------------------------------------------------------------------------------------------------------- steps

    def next_parts(self) -> EncoderCall | None:
        """Return the part of the encoder that the next step runs, which must then be dispatched. Begins a call if none is in
        progress."""
        if self.is_idle:
            return None
        if self._call is None:
            self._begin_call()
        call = self._call
        if call is None:
            return None
        first = call.message.last_part
        last = self._cost.end_after(first, call.parts)
        call.message = EncoderCall(call.message.call_id, call.message.units, first, last, len(call.parts))
        if call.message.is_last:
            self._call = None
        return call.message

    def dispatched(self, step_id: int, read: list[CachedUnit], message: EncoderCall | None) -> None:
        """Record that a step that runs these parts and reads these units is in flight."""
        part = _StepPart(read, read)
        if message is not None:
            units = [unit for encode in message.units if (unit := self.cache.get(encode.unit_hash)) is not None]
            part.touched = read + units
            part.completed = units if message.is_last else []
            for unit in part.completed:
                unit.state = UnitState.DISPATCHED
            if message.first_part == 0:
                part.pixels, self._lent = self._lent, []
        if part.touched:
            self.cache.use(part.touched)
            self._parts[step_id] = part

    def completed(self, step_id: int, encoded: Collection[bytes]) -> None:
        """Handle the result of step `step_id`."""
        part = self._parts.pop(step_id, None)
        if part is None:
            return
        self._end(part)
        for unit in part.completed:
            if unit.state is not UnitState.DISPATCHED:
                continue
            if unit.unit_hash in encoded:
                unit.state = UnitState.CONFIRMED
            else:
                self.cache.forget(unit)
        for unit in part.read:
            self._losses.pop(unit.unit_hash, None)
        self._show()

    def rollback(self) -> None:
        """Return to what results have confirmed: the steps in flight are lost. Unfinished units start again at part 0."""
        for part in self._parts.values():
            self._end(part)
        self._parts.clear()
        self._drop_call()
        for unit in list(self.cache):
            if unit.state is not UnitState.CONFIRMED:
                self.cache.forget(unit)

    def lost(self, missing: Mapping[bytes, str]) -> list[bytes]:
        """Encode units again that a rank lacks (features or pixels). Return those that were lost too often."""
        for unit_hash in missing:
            unit = self.cache.get(unit_hash)
            if unit is not None:
                self.cache.forget(unit)
            self._losses[unit_hash] = self._losses.get(unit_hash, 0) + 1
        self._cells["losses"].add(len(missing))
        hopeless = [unit_hash for unit_hash in missing if self._losses[unit_hash] >= MAX_LOSSES]
        for unit_hash in hopeless:
            del self._losses[unit_hash]
        return hopeless

    def clear(self) -> None:
        """Forget all features: the weights changed, or an operator asked for it."""
        self._drop_call()
        self.cache.clear()
        self._show()

    # ------------------------------------------------------------------------------------------------------ pixels

    def pixels_came(self, pixels: Pixels) -> None:
        self._pixels.came(pixels)

    def pixels_failed(self, failed: PixelsFailed, now_ns: int) -> bytes:
        """Handle a failure. Return the unit if it is given up; empty: it is tried again."""
        num_lent = len(self._lent) + sum(len(part.pixels) for part in self._parts.values())
        return self._pixels.failed(failed, num_lent, now_ns)

    def media_restarted(self, name: str, epoch: int) -> None:
        self._pixels.media_restarted(name, epoch)

    # ------------------------------------------------------------------------------------------------------- calls

    def _begin_call(self) -> None:
        """Begin a call with the needed units that are not cached and have pixels, as many as fit."""
        needs = self.needs.look_up()
        num_rows = 0
        units: list[CachedUnit] = []
        encodes: list[Encode] = []
        self._is_without_room = False
        for unit_hash, need in needs.items():
            pixels = self._pixels.ready(unit_hash)
            if pixels is None:
                continue
            is_full = num_rows + need.unit.num_rows > MAX_CALL_STEPS * self._max_rows or len(units) == MAX_CALL_UNITS
            if units and is_full:
                break
            unit = self.cache.begin(unit_hash, need.unit.num_rows, self._victims(need, needs))
            if unit is not None:
                num_rows += unit.num_rows
                units.append(unit)
                encodes.append(_encode(need.unit, unit, pixels))
                self._lent.append(self._pixels.take(unit_hash))
            else:
                self._is_without_room = not units
                if need.is_next:  # rows that are freed belong to this one
                    break
        if not units:
            return
        self._num_calls += 1
        parts = self._cost.parts_of([encode.num_rows for encode in encodes if not encode.is_features])
        self._call = _Call(EncoderCall(self._num_calls, encodes, 0, 0, len(parts)), units, parts)
        self._cells["calls"].add(1)
        self._cells["units"].add(len(units))
        self._cells["rows"].add(num_rows)

    def _victims(self, need: Need, needs: dict[bytes, Need]) -> Iterator[CachedUnit]:
        """Yield units that may be evicted for a unit: first unneeded ones, then, where a sequence waits for it, those that
        later sequences need."""
        unneeded = (unit for unit in self.cache.evictable() if unit.unit_hash not in needs)
        if not need.is_next:
            return unneeded
        behind = takewhile(lambda other: other.place > need.place, reversed(needs.values()))
        found = (self.cache.get(other.unit.unit_hash) for other in behind)
        return chain(unneeded, (unit for unit in found if unit is not None and unit.can_go))

    def _drop_call(self) -> None:
        for request in self._lent:
            self._pixels.give_back(request)
        self._lent = []
        if self._call is not None:
            for unit in self._call.units:
                self.cache.forget(unit)
            self._call = None

    def _end(self, part: _StepPart) -> None:
        self.cache.unuse(part.touched)
        for request in part.pixels:
            self._pixels.give_back(request)

    def _show(self) -> None:
        self._usage.set(self.cache.num_used_rows / self.cache.num_rows)
        self._num_cached.set(len(self.cache))
        self._cells["evictions"].set(self.cache.num_evictions)


def _encode(needed: PromptUnit, unit: CachedUnit, pixels: Pixels) -> Encode:
    _, height, width = needed.item.grid_thw
    is_features = needed.item.source.is_features
    return Encode(unit.unit_hash, unit.first_row, unit.num_rows, height, width, pixels.media, pixels.handle, is_features)
