"""`tokamak trace`: records a trace of a running engine for a while and writes it to a file, or reads the trace that a hung or
dead engine left.

This process creates the rings in shared memory, and actors find them through the counters file, without a request. They record
until the time is over, even if this process is killed. An engine started with `--trace` has its own rings, which are only read.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.errors import OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from engine.process.run_directory import Run, choose_run
from engine.process.topology import SUPERVISOR
from shm.counters import Counters
from shm.trace import TraceEvent, TraceRing
from tools.trace.perfetto import document

READ_INTERVAL_S = 0.1  # a ring holds several of these of the busiest actor
GRACE_S = 0.2  # time in which actors notice a trace
MAX_SECONDS = 600.0
MAX_EVENTS = 500_000  # maximum number of events of all actors


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    asked = _parser().parse_args(arguments)
    try:
        run = choose_run(asked.run, asked.run_dir)
        _check_output(asked.output)
        events, num_lost = record(run, asked.seconds)
        written = document(events, run.run_id, num_lost)
        asked.output.write_bytes(written)
    except OptionError as error:
        print(f"tokamak trace: error: {error}", file=sys.stderr)
        return 2
    except (TokamakError, OSError) as error:
        print(f"tokamak trace: error: {error}", file=sys.stderr)
        return 1
    num_events = sum(map(len, events.values()))
    if num_events >= MAX_EVENTS:
        print(f"stopped early: reached the limit of {MAX_EVENTS} events per file", file=sys.stderr)
    lost = f", {num_lost} were overwritten before they were read" if num_lost else ""
    print(f"wrote {num_events} events of {len(events)} actors to {asked.output}{lost}; open it at https://ui.perfetto.dev")
    return 0


def _check_output(path: Path) -> None:
    """Check that the file can be written: OSError now rather than after the trace. Leaves existing files unchanged and no new
    one."""
    if path.is_file() or path.is_dir():
        path.open("ab").close()
    elif not path.exists():
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            error.filename = str(path)
            raise


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="tokamak trace", description="Record what every actor does, as a file for https://ui.perfetto.dev."
    )
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="how long to record a running engine (default: 10)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run",
        default="",
        metavar="ID",
        help="run id or its beginning; default: the running engine, otherwise the last one that died",
    )
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of the engine")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SECONDS or math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number of seconds up to {MAX_SECONDS:g}, got {text}")
    return value


def record(run: Run, seconds: float) -> tuple[dict[str, list[TraceEvent]], int]:
    """Return the events of each actor in order, and how many were lost. TokamakError if there is no trace."""
    counters = Counters.attach_readonly(run.run_id)
    actors = [actor.name for actor in counters.actors() if actor.name != SUPERVISOR]
    is_alive = counters.segment.owner.is_alive()
    counters.close()
    found = _own_rings(run, actors)
    if found and (not is_alive or not any(ring.until_ns for ring in found.values())):
        return _taken(found, _collect(found, seconds if is_alive else 0.0))
    if not is_alive:
        raise TokamakError(
            f"engine {run.run_id} is dead and left no trace; start engines with --trace to keep the latest events"
        )
    with _begun(run, actors, seconds) as rings:
        begin_ns = _collect(rings, seconds + GRACE_S)
    return _taken(rings, begin_ns)


def _own_rings(run: Run, actors: Sequence[str]) -> dict[str, TraceRing]:
    """Return the existing rings of the engine."""
    found = {actor: TraceRing.attach(run.run_id, actor, is_readonly=True) for actor in actors}
    return {actor: ring for actor, ring in found.items() if ring is not None}


@contextlib.contextmanager
def _begun(run: Run, actors: Sequence[str], seconds: float) -> Iterator[dict[str, TraceRing]]:
    """Provide new rings, which actors find; they are removed at the end."""
    for actor, ring in _own_rings(run, actors).items():
        if ring.owner.is_alive():
            raise TokamakError(
                f"process {ring.owner.pid} is already tracing engine {run.run_id} ({actor}); wait until it has finished"
            )
        ring.unlink()  # of a killed `tokamak trace`
    until_ns = time.monotonic_ns() + int((seconds + GRACE_S) * 1e9)
    counters = Counters.attach(run.run_id)
    rings: dict[str, TraceRing] = {}
    try:
        for actor in actors:
            rings[actor] = TraceRing.create(run.run_id, actor, until_ns=until_ns)
        counters.advance_trace_generation()
        yield rings
    finally:
        for ring in rings.values():
            ring.end(time.monotonic_ns())
            ring.unlink()
        counters.advance_trace_generation()
        counters.close()


def _collect(rings: Mapping[str, TraceRing], seconds: float) -> int:
    """Record for `seconds` (0: only read the rings) and return when recording began. Ctrl+C ends it early. Events are decoded
    afterwards, because the engine may need the processor."""
    num_events = 0
    end_s = time.monotonic() + seconds
    begin_ns = time.monotonic_ns() if seconds else 0
    with contextlib.suppress(KeyboardInterrupt):
        while num_events < MAX_EVENTS:
            num_events += sum(ring.collect() for ring in rings.values())
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(READ_INTERVAL_S, left_s))
    return begin_ns


def _taken(rings: Mapping[str, TraceRing], begin_ns: int) -> tuple[dict[str, list[TraceEvent]], int]:
    """Return the events of each actor from `begin_ns` on, and how many were lost since then."""
    own = {actor: [event for event in ring.take() if event.begin_ns >= begin_ns] for actor, ring in rings.items()}
    return own, sum(ring.num_lost for ring in rings.values()) if begin_ns else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
