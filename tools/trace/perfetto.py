"""Events of actors as Chrome's trace event format, which Perfetto reads.

    a process           each actor
    slices              what its thread did; ranks have a second row with the ops of some steps
    flows of requests   arrows from an actor's work on a request to the next actor's
    flows of steps      arrows from the scheduling of a step to the rank and back
    async slices        phases of each sequence: preparing, waiting, prefill, decode

Source: the "Trace Event Format" of Chromium's catapult project. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec
import orjson

from engine.process.topology import ROLES, role_of
from engine.process.tracer import OPS
from shm.trace import TraceEvent

OF_REQUESTS = (  # phases of a sequence, in order
    "submit",
    "prepare",
    "tokenized",
    "queue",
    "admit",
    "begin sample",
    "first result",
    "last result",
    "decode text",
    "first token",
    "last token",
)
OF_STEPS = ("schedule", "step", "forward", "sample", "result")
PARTS = (  # phases of a sequence, from one event to another
    ("preparing", "submit", "tokenized"),
    ("waiting", "tokenized", "admit"),
    ("prefill", "admit", "first token"),
    ("decode", "first token", "last token"),
)
TRACKS = {0: "loop", OPS: "ops (of some steps)"}


class _Placed(msgspec.Struct, frozen=True):
    event: TraceEvent
    pid: int


def document(events: Mapping[str, Sequence[TraceEvent]], run_id: str, num_lost: int = 0) -> bytes:
    """Return JSON. `events`: by actor."""
    actors = sorted(events, key=lambda name: (ROLES.index(role_of(name)) if role_of(name) in ROLES else len(ROLES), name))
    placed = [_Placed(event, pid) for pid, actor in enumerate(actors, 1) for event in events[actor]]
    placed.sort(key=lambda one: (one.event.begin_ns, -one.event.duration_ns))
    start_ns = placed[0].event.begin_ns if placed else 0
    return orjson.dumps(
        {
            "displayTimeUnit": "ms",
            "otherData": {"run": run_id, "events_lost": num_lost, "start_monotonic_ns": start_ns},
            "traceEvents": [
                *_names(actors, placed),
                *(_slice(one, start_ns) for one in placed),
                *_flows_of_requests(placed, start_ns),
                *_flows_of_steps(placed, start_ns),
            ],
        }
    )


def _names(actors: Sequence[str], placed: Iterable[_Placed]) -> Iterator[dict[str, Any]]:
    tracks = sorted({(one.pid, one.event.track) for one in placed})
    for pid, actor in enumerate(actors, 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": actor}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for pid, track in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": TRACKS.get(track, str(track))}}


def _slice(one: _Placed, start_ns: int) -> dict[str, Any]:
    event = one.event
    arguments: dict[str, Any] = {}
    if event.label:
        arguments["request" if event.name in OF_REQUESTS else "what"] = event.label
    if event.value:
        arguments["step" if event.name in OF_STEPS else "value"] = event.value
    return {
        "ph": "X",
        "name": event.name,
        "cat": "op" if event.track == OPS else "request" if event.name in OF_REQUESTS else "actor",
        "ts": (event.begin_ns - start_ns) / 1000,
        "dur": event.duration_ns / 1000,
        "pid": one.pid,
        "tid": event.track,
        "args": arguments,
    }


def _flows_of_requests(placed: Iterable[_Placed], start_ns: int) -> Iterator[dict[str, Any]]:
    by_request: dict[str, list[_Placed]] = {}
    for one in placed:
        if one.event.name in OF_REQUESTS and one.event.label:
            by_request.setdefault(one.event.label, []).append(one)
    for request, own in by_request.items():
        yield from _flow("request", request, own, start_ns)
        yield from _life(request, own, start_ns)


def _flows_of_steps(placed: Iterable[_Placed], start_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the flows of steps. Replicas may use the same step numbers, but the spans of one step are close in time."""
    open_steps: dict[int, list[_Placed]] = {}
    for one in placed:
        if one.event.name not in ("schedule", "step", "result"):
            continue
        own = open_steps.setdefault(one.event.value, [])
        own.append(one)
        if one.event.name == "result":
            yield from _flow("step", f"step {one.event.value} {one.event.begin_ns}", open_steps.pop(one.event.value), start_ns)


def _flow(kind: str, key: str, own: Sequence[_Placed], start_ns: int) -> Iterator[dict[str, Any]]:
    """Return arrows from each span to the next."""
    if len(own) < 2:
        return
    for index, one in enumerate(own):
        phase = "s" if index == 0 else "f" if index == len(own) - 1 else "t"
        arrow: dict[str, Any] = {
            "ph": phase,
            "name": kind,
            "cat": kind,
            "id": crc32(key.encode()),
            "ts": (one.event.begin_ns - start_ns) / 1000,
            "pid": one.pid,
            "tid": one.event.track,
        }
        yield {**arrow, "bp": "e"} if phase == "f" else arrow


def _life(request: str, own: Sequence[_Placed], start_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the span from a request's first event to its last, including attempts that were lost in a crash."""
    first: dict[str, TraceEvent] = {}
    last: dict[str, TraceEvent] = {}
    for one in own:
        first.setdefault(one.event.name, one.event)
        last[one.event.name] = one.event
    spans = [(name, first[begin], last[end]) for name, begin, end in PARTS if begin in first and end in last]
    if "submit" in first and "last token" in last:
        spans.insert(0, ("sample", first["submit"], last["last token"]))
    pid = own[0].pid
    for name, begin, end in spans:
        end_ns = end.begin_ns + end.duration_ns
        if end_ns < begin.begin_ns:
            continue
        common = {"cat": "sample", "name": name, "id": request, "pid": pid, "tid": 0}
        yield {**common, "ph": "b", "ts": (begin.begin_ns - start_ns) / 1000, "args": {"request": request}}
        yield {**common, "ph": "e", "ts": (end_ns - start_ns) / 1000}
