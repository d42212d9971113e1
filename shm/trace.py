"""The trace of one actor: its last events in a ring that any process may read, while it runs, hangs, or after it died.

Created on request, by the supervisor (`--trace`) or by a tool for a running engine. The tool then increments the trace
generation in the counters file, which actors read several times a second (`engine/process/tracer.py`). Without a request there
is no ring. The diagrams of both structs are in `shm/native/layout.h`.
"""

from __future__ import annotations

import struct

import msgspec

from shm import _native
from shm._native import TraceWriter as TraceWriter
from shm.errors import SharedMemoryError
from shm.layout import StructView, offset_of, size_of
from shm.process import ProcessIdentity
from shm.segment import HEADER_BYTES, Segment, own_segment_names, segment_name

KIND = "trace"
NUM_EVENTS = 8192
MAX_NAMES = 256
EVENT_BYTES = size_of("TraceEvent")
_EVENT = struct.Struct("<QQQIIq88s")
_HEADER_OFFSET = HEADER_BYTES
_NAMES_OFFSET = HEADER_BYTES + size_of("TraceHeader")

assert _EVENT.size == EVENT_BYTES
assert offset_of("TraceEvent", "label") == _EVENT.size - 88


class TraceEvent(msgspec.Struct, frozen=True):
    """Event from `begin_ns` to `begin_ns + duration_ns`, CLOCK_MONOTONIC."""

    name: str
    begin_ns: int
    duration_ns: int
    track: int
    value: int
    label: str


class TraceRing:
    """Events of one actor; `num_lost` counts events that were overwritten before they were collected."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._header = StructView("TraceHeader", segment.buffer, _HEADER_OFFSET)
        self._num_events = self._header.word("num_events")
        self._names_offset, self._events_offset = self._header.word("names_offset"), self._header.word("events_offset")
        num_bytes = len(segment.buffer)
        if not self._num_events or self._events_offset + self._num_events * EVENT_BYTES > num_bytes:
            raise SharedMemoryError(
                f"{segment.name} is too small: its header claims {self._num_events} events, but it has {num_bytes} bytes"
            )
        self._names: list[str] = []
        self._num_collected = 0
        self._collected: list[tuple[int, int, bytes]] = []  # number of the first event, number of the oldest intact one, events
        self.num_lost = 0

    @classmethod
    def create(cls, run_id: str, actor: str, num_events: int = NUM_EVENTS, until_ns: int = 0) -> TraceRing:
        """Create a ring for events before `until_ns` (0: all). SharedMemoryError if one exists, or there is no room."""
        events_offset = _NAMES_OFFSET + MAX_NAMES * _native.TRACE_NAME_BYTES

        def initialise(buffer: memoryview) -> None:
            header = StructView("TraceHeader", buffer, _HEADER_OFFSET)
            header.set_word("max_names", MAX_NAMES)
            header.set_word("num_events", num_events)
            header.set_word("until_ns", until_ns)
            header.set_word("names_offset", _NAMES_OFFSET)
            header.set_word("events_offset", events_offset)

        name = segment_name(run_id, KIND, actor)
        return cls(Segment.create(name, events_offset + num_events * EVENT_BYTES, initialise))

    @classmethod
    def attach(cls, run_id: str, actor: str, *, is_readonly: bool = False) -> TraceRing | None:
        """Attach to the ring. None if no trace is requested, or the name belongs to another user."""
        name = segment_name(run_id, KIND, actor)
        if name not in own_segment_names(run_id):
            return None
        try:
            return cls(Segment.attach(name, is_readonly=is_readonly, timeout_s=0.0))
        except SharedMemoryError:
            return None  # just removed, or not ready yet: its creator increments the generation once it is

    @property
    def owner(self) -> ProcessIdentity:
        """Process that created the ring."""
        return self.segment.owner

    @property
    def until_ns(self) -> int:
        return self._header.word("until_ns")

    def end(self, now_ns: int) -> None:
        """Stop recording later events."""
        self._header.set_word("until_ns", max(1, now_ns))

    def writer(self) -> TraceWriter:
        """Return the writer. For the actor only."""
        return TraceWriter(self.segment.buffer)

    def collect(self) -> int:
        """Copy the events written since the last call, for a later `take`, and return their number. This is cheap, because a
        reader of a running trace influences it."""
        end = self._header.word("num_written")
        begin = max(self._num_collected, end - self._num_events)
        copy = self._copy(begin, end)
        _native.fence()  # SYNC: the copy is older than the next read of num_written
        oldest = self._header.word("num_written") - self._num_events + 1  # the one before may be partly overwritten
        self._collected.append((begin, oldest, copy))
        num_new, self._num_collected = end - self._num_collected, end
        self.num_lost += num_new
        return num_new

    def take(self) -> list[TraceEvent]:
        """Return the events since the last call that were intact when collected, in the order in which they ended."""
        self.collect()
        collected, self._collected = self._collected, []
        events = [
            self._event(*fields)
            for begin, oldest, copy in collected
            for number, (sequence, *fields) in enumerate(_EVENT.iter_unpack(copy), begin)
            if number >= oldest and sequence == number + 1
        ]
        self.num_lost -= len(events)
        return events

    def close(self) -> None:
        self.segment.close()
        self._header = StructView("TraceHeader", memoryview(b""))

    def unlink(self) -> None:
        self.segment.unlink()

    def _copy(self, begin: int, end: int) -> bytes:
        """Return the bytes of the events [begin, end), at most one ring, which may wrap to the ring's beginning."""
        first = begin % self._num_events
        last = first + end - begin
        spans = ((first, min(last, self._num_events)), (0, max(0, last - self._num_events)))
        offset, buffer = self._events_offset, self.segment.buffer
        return b"".join(buffer[offset + start * EVENT_BYTES : offset + stop * EVENT_BYTES] for start, stop in spans)

    def _event(self, begin_ns: int, duration_ns: int, name: int, track: int, value: int, label: bytes) -> TraceEvent:
        text = label.split(b"\0", 1)[0].decode(errors="replace")
        return TraceEvent(self._name(name), begin_ns, duration_ns, track, value, text)

    def _name(self, name_id: int) -> str:
        # SYNC: the load-acquire of num_names pairs with the store-release in TraceWriter::name_id.
        if name_id >= len(self._names):
            for index in range(len(self._names), min(self._header.word("num_names"), MAX_NAMES)):
                begin = self._names_offset + index * _native.TRACE_NAME_BYTES
                raw = bytes(self.segment.buffer[begin : begin + _native.TRACE_NAME_BYTES])
                self._names.append(raw.split(b"\0", 1)[0].decode(errors="replace"))
        return self._names[name_id] if name_id < len(self._names) else "?"
