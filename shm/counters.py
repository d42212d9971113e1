"""The counters file: all counters in one segment that any process may map read-only, while the engine runs, hangs, or after it
died.

The supervisor creates it from the metric rows of each actor's role; each actor attaches and writes its own cells, its row of
the actor table and its section of the error log, also after a restart, so that counters continue. The file describes itself:
its metadata is JSON that locates the rows of each actor, and those rows, also JSON, locate each of its metrics. So an actor
reads only its own rows, a sixth of all. `/metrics`, `tokamak top` and `tokamak ctl` print the rows that they find.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypedDict

import msgspec

from shm import _native
from shm._native import Cell, Histogram
from shm.actor_table import ROW_BYTES, ActorRow, ActorSnapshot, State, role_of, write_row
from shm.error_log import ENTRIES_PER_ACTOR, ENTRY_BYTES, ErrorLog, ErrorSnapshot
from shm.errors import SharedMemoryError
from shm.layout import LINE, StructView, offset_of, round_up, size_of
from shm.segment import Segment, segment_name

__all__ = [
    "ActorRow",
    "ActorSnapshot",
    "Cell",
    "Counters",
    "ErrorLog",
    "ErrorSnapshot",
    "HistogramCells",
    "MetricLike",
    "State",
]

HistogramCells = Histogram
RowKey = tuple[str, frozenset[tuple[str, str]]]  # name, labels
KIND = "counters"
NAME = "main"
COUNTERS_OFFSET = size_of("SegmentHeader")
ACTORS_OFFSET = COUNTERS_OFFSET + size_of("CountersHeader")
FLOAT_UNITS = ("seconds", "ratio")  # cells of these are f64, all others i64


class MetricLike(Protocol):
    """Fields from which a row is made, as in `engine.metrics.Metric`."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...  # "counter" | "gauge" | "histogram"
    @property
    def unit(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def labels(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def bounds(self) -> tuple[float, ...]: ...


class Row(TypedDict):
    """Metadata of one metric of one actor."""

    name: str
    kind: str
    unit: str
    help: str
    labels: dict[str, str]  # those of the metric, and "actor"
    type: str  # "i64" | "f64" | "histogram"
    offset: int
    bounds: list[float]


class Counters:
    """The file, mapped by one process. Each process writes only its own parts (see the module)."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        header = self._header = StructView("CountersHeader", segment.buffer, COUNTERS_OFFSET)
        self._places: dict[str, tuple[int, int]] = self._read(header.word("metadata_offset"), header.word("metadata_bytes"))
        actors_offset = header.word("actors_offset")
        rows = (ActorRow(segment.buffer, actors_offset + index * ROW_BYTES) for index in range(header.word("num_actors")))
        self._actors = {row.name: row for row in rows}
        self.errors = ErrorLog(segment.buffer, header.word("errors_offset"), list(self._actors))
        self._rows_of: dict[str, dict[RowKey, Row]] = {}  # of the requested actors
        self._cells: list[Cell | Histogram] | None = None

    @classmethod
    def create(cls, run_id: str, actors: Sequence[str], metrics_of: Callable[[str], Iterable[MetricLike]]) -> Counters:
        """Create a file with the rows `metrics_of(role)` for each actor. Called by the supervisor."""
        rows, values_bytes = _lay_out({actor: metrics_of(role_of(actor)) for actor in actors})
        rows_offset = ACTORS_OFFSET + len(actors) * ROW_BYTES
        values_offset = rows_offset
        while True:  # offsets depend on the metadata's length, which depends on the offsets
            texts = [_encoded([{**row, "offset": row["offset"] + values_offset} for row in rows[actor]]) for actor in actors]
            ends = [*accumulate(map(len, texts), initial=rows_offset)]
            metadata_offset = ends[-1]
            metadata = _encoded({actor: (begin, len(text)) for actor, begin, text in zip(actors, ends, texts, strict=False)})
            end = round_up(metadata_offset + len(metadata), LINE)
            if end == values_offset:
                break
            values_offset = end
        errors_offset = values_offset + values_bytes

        def initialise(buffer: memoryview) -> None:
            header = StructView("CountersHeader", buffer, COUNTERS_OFFSET)
            header.set_word("num_actors", len(actors))
            header.set_word("errors_per_actor", ENTRIES_PER_ACTOR)
            header.set_word("actors_offset", ACTORS_OFFSET)
            header.set_word("metadata_offset", metadata_offset)
            header.set_word("metadata_bytes", len(metadata))
            header.set_word("values_offset", values_offset)
            header.set_word("values_bytes", values_bytes)
            header.set_word("errors_offset", errors_offset)
            for index, actor in enumerate(actors):
                write_row(buffer, ACTORS_OFFSET + index * ROW_BYTES, actor)
            buffer[rows_offset : metadata_offset + len(metadata)] = b"".join((*texts, metadata))

        num_bytes = errors_offset + len(actors) * ENTRIES_PER_ACTOR * ENTRY_BYTES
        return cls(Segment.create(segment_name(run_id, KIND, NAME), num_bytes, initialise))

    @classmethod
    def attach(cls, run_id: str) -> Counters:
        """Attach as an actor of the run."""
        return cls(Segment.attach(segment_name(run_id, KIND, NAME)))

    @classmethod
    def attach_readonly(cls, run: str | Path) -> Counters:
        """Attach as a reader, by run id or by path. Works without a living engine."""
        if isinstance(run, Path) or "/" in run:
            return cls(Segment.attach_file(Path(run), is_readonly=True, timeout_s=1.0))
        return cls(Segment.attach(segment_name(run, KIND, NAME), is_readonly=True, timeout_s=1.0))

    @property
    def run_id(self) -> str:
        return self.segment.run_id

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all actors."""
        return [row for actor in self._actors for row in self._rows(actor).values()]

    @property
    def trace_generation(self) -> int:
        """Return how many traces were begun or ended (`shm/trace.py`)."""
        return self._header.word("trace_generation")

    def advance_trace_generation(self) -> None:
        """Count a trace that begins or ends."""
        offset = COUNTERS_OFFSET + offset_of("CountersHeader", "trace_generation")
        _native.fetch_add_u64(self.segment.buffer, offset, 1)

    def counter(self, name: str, actor: str, **labels: str) -> Cell:
        """Return the cell of a counter or gauge, which continues from its previous value. Only the actor may write it."""
        row = self._row(name, actor, labels)
        if row["kind"] == "histogram":
            raise SharedMemoryError(f"{name} of {actor} is a histogram; use histogram(...)")
        return Cell(self.segment.buffer, row["offset"], row["type"] == "f64")

    def histogram(self, name: str, actor: str, **labels: str) -> HistogramCells:
        row = self._row(name, actor, labels)
        if row["kind"] != "histogram":
            raise SharedMemoryError(f"{name} of {actor} is a {row['kind']}; use counter(...)")
        return Histogram(self.segment.buffer, row["offset"], row["bounds"])

    def actor(self, name: str) -> ActorRow:
        """Return the live row of one actor."""
        try:
            return self._actors[name]
        except KeyError:
            raise SharedMemoryError(f"no actor {name!r} in this run; it has {', '.join(self._actors)}") from None

    def actors(self) -> list[ActorSnapshot]:
        """Return a snapshot of all rows of the actor table."""
        return [row.snapshot() for row in self._actors.values()]

    def snapshot(self) -> dict[str, Any]:
        """Return everything as plain data: "run_id", "created_ns", "actors", "errors" and "metrics". Each metric has "name",
        "kind", "unit", "help", "labels" (with "actor") and either "value" or "bounds", "buckets" (one more than bounds, not
        cumulated), "sum" and "count"."""
        return {
            "run_id": self.run_id,
            "created_ns": self.segment.header.word("created_ns"),
            "actors": [{**msgspec.structs.asdict(actor), "state": actor.state.name} for actor in self.actors()],
            "metrics": self._metrics(),
            "errors": [msgspec.structs.asdict(error) for error in self.errors.entries()],
        }

    def close(self) -> None:
        self._cells = None
        self._header = StructView("CountersHeader", memoryview(b""))
        self.segment.close()

    def unlink(self) -> None:
        self.segment.unlink()

    def _metrics(self) -> list[dict[str, Any]]:
        rows = self.rows
        if self._cells is None:
            self._cells = [self._open(row) for row in rows]
        metrics = []
        for row, cell in zip(rows, self._cells, strict=True):
            metric: dict[str, Any] = {key: row[key] for key in ("name", "kind", "unit", "help", "labels")}
            if isinstance(cell, Histogram):
                buckets = cell.buckets
                metric |= {"bounds": row["bounds"], "buckets": buckets, "sum": cell.sum, "count": sum(buckets)}
            else:
                metric["value"] = cell.value
            metrics.append(metric)
        return metrics

    def _open(self, row: Row) -> Cell | Histogram:
        if row["kind"] == "histogram":
            return Histogram(self.segment.buffer, row["offset"], row["bounds"])
        return Cell(self.segment.buffer, row["offset"], row["type"] == "f64")

    def _row(self, name: str, actor: str, labels: dict[str, str]) -> Row:
        try:
            return self._rows(actor)[_key(name, {**labels, "actor": actor})]
        except KeyError:
            raise SharedMemoryError(f"{actor} has no metric {name} with labels {labels}; add it to its role's rows") from None

    def _rows(self, actor: str) -> dict[RowKey, Row]:
        rows = self._rows_of.get(actor)
        if rows is None:
            found: list[Row] = self._read(*self._places[actor])
            rows = self._rows_of[actor] = {_key(row["name"], row["labels"]): row for row in found}
        return rows

    def _read(self, offset: int, num_bytes: int) -> Any:
        return json.loads(bytes(self.segment.buffer[offset : offset + num_bytes]))


def _encoded(content: object) -> bytes:
    return json.dumps(content).encode()


def _key(name: str, labels: dict[str, str]) -> RowKey:
    return name, frozenset(labels.items())


def _lay_out(metrics_of_actor: dict[str, Iterable[MetricLike]]) -> tuple[dict[str, list[Row]], int]:
    """Return the rows of each actor with offsets from the beginning of the values, and the size of the values."""
    rows: dict[str, list[Row]] = {}
    end = 0
    for actor, metrics in metrics_of_actor.items():
        rows[actor] = []
        for metric in metrics:
            is_histogram = metric.kind == "histogram"
            rows[actor].append(
                Row(
                    name=metric.name,
                    kind=metric.kind,
                    unit=metric.unit,
                    help=metric.help,
                    labels={**dict(metric.labels), "actor": actor},
                    type="histogram" if is_histogram else "f64" if metric.unit in FLOAT_UNITS else "i64",
                    offset=end,
                    bounds=[float(bound) for bound in metric.bounds],
                )
            )
            num_bytes = size_of("HistogramHeader") + 8 * (len(metric.bounds) + 1) if is_histogram else size_of("CellLine")
            end += round_up(num_bytes, LINE)
    return rows, end
