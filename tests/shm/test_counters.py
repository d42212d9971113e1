"""The counters file: rows, cells, histograms, actor table and error log, for writers and read-only readers."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shm import layout
from shm.counters import Cell, Counters, State
from shm.error_log import ENTRIES_PER_ACTOR, OVERFLOW_TEXT
from shm.errors import SharedMemoryError
from shm.process import ProcessIdentity
from shm.segment import DIRECTORY, segment_name


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()


METRICS = {
    "api": (
        Metric("requests_total", "counter", "requests", "Requests."),
        Metric("responses_total", "counter", "responses", "By class.", (("status", "2xx"),)),
        Metric("responses_total", "counter", "responses", "By class.", (("status", "5xx"),)),
        Metric("open_requests", "gauge", "requests", "Open."),
        Metric("busy_seconds_total", "counter", "seconds", "Busy."),
        Metric("latency_seconds", "histogram", "seconds", "Latency.", (), (0.1, 1, 10)),
    ),
    "supervisor": (Metric("restarts_total", "counter", "restarts", "Restarts."),),
}
ACTORS = ["supervisor", "api0", "api1"]


@pytest.fixture
def counters(run_id: str) -> Counters:
    Counters.create(run_id, ACTORS, METRICS.__getitem__)
    return Counters.attach(run_id)


def value_of(counters: Counters, name: str, **labels: str) -> int | float:
    (value,) = [row["value"] for row in counters.snapshot()["metrics"] if row["name"] == name and row["labels"] == labels]
    assert isinstance(value, int | float)
    return value


def test_each_metric_label_and_actor_has_a_cell(counters: Counters) -> None:
    counters.counter("requests_total", "api0").add(2)
    counters.counter("requests_total", "api0").add()
    counters.counter("requests_total", "api1").add(10)
    counters.counter("responses_total", "api0", status="5xx").add(7)
    looking = Counters.attach_readonly(counters.run_id)
    assert value_of(looking, "requests_total", actor="api0") == 3
    assert value_of(looking, "requests_total", actor="api1") == 10
    assert value_of(looking, "responses_total", actor="api0", status="5xx") == 7
    assert value_of(looking, "responses_total", actor="api0", status="2xx") == 0
    assert looking.counter("responses_total", "api0", status="5xx").value == 7


def test_gauges_are_set_and_go_down(counters: Counters) -> None:
    gauge = counters.counter("open_requests", "api0")
    gauge.set(5)
    gauge.add(-7)
    assert gauge.value == -2


def test_seconds_are_floats_and_whole_things_are_not(counters: Counters) -> None:
    seconds = counters.counter("busy_seconds_total", "api0")
    seconds.add(0.25)
    seconds.add(1)
    assert seconds.value == 1.25
    requests = counters.counter("requests_total", "api0")
    with pytest.raises(TypeError):
        requests.add(0.5)
    with pytest.raises(TypeError):
        seconds.add("1")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        requests.add(1 << 70)
    assert requests.value == 0


def test_histogram_counts_up_to_and_with_its_bounds(counters: Counters) -> None:
    histogram = counters.histogram("latency_seconds", "api0")
    for value in (0, 0.1, 0.11, 1, 10, 10.5, float("inf")):
        histogram.observe(value)
    histogram.observe_many(0.5, 3)
    assert histogram.buckets == [2, 5, 1, 2]
    assert histogram.count == 10
    with pytest.raises(ValueError, match="NaN"):
        histogram.observe(float("nan"))
    (row,) = [
        row for row in counters.snapshot()["metrics"] if row["kind"] == "histogram" and row["labels"] == {"actor": "api0"}
    ]
    assert (row["bounds"], row["buckets"], row["count"], row["sum"]) == ([0.1, 1, 10], [2, 5, 1, 2], 10, float("inf"))
    assert counters.histogram("latency_seconds", "api1").count == 0


def test_unknown_names_are_errors(counters: Counters) -> None:
    with pytest.raises(SharedMemoryError, match="supervisor has no metric requests_total"):
        counters.counter("requests_total", "supervisor")
    with pytest.raises(SharedMemoryError, match=r"no metric responses_total with labels {'status': '3xx'}"):
        counters.counter("responses_total", "api0", status="3xx")
    with pytest.raises(SharedMemoryError, match="is a histogram"):
        counters.counter("latency_seconds", "api0")
    with pytest.raises(SharedMemoryError, match="is a counter"):
        counters.histogram("requests_total", "api0")
    with pytest.raises(SharedMemoryError, match="no actor 'api2' in this run; it has supervisor, api0, api1"):
        counters.actor("api2")


def test_looking_on_never_writes(counters: Counters) -> None:
    looking = Counters.attach_readonly(counters.run_id)
    writes = [
        lambda: looking.counter("requests_total", "api0").add(1),
        lambda: looking.counter("requests_total", "api0").set(1),
        lambda: looking.histogram("latency_seconds", "api0").observe(1),
        lambda: looking.actor("api0").beat(1),
        lambda: looking.actor("api0").set_state(State.READY),
    ]
    for write in writes:
        with pytest.raises(SharedMemoryError, match="read-only"):
            write()
    assert looking.snapshot()["actors"][1]["state"] == "SPAWNED"


def test_actor_table(counters: Counters) -> None:
    row = counters.actor("api1")
    row.begin_epoch(2, now_ns=100)
    assert (row.state, row.epoch, row.pid, row.heartbeat_ns) == (State.SPAWNED, 2, 0, 100)
    me = ProcessIdentity.of()
    row.set_process(me)
    row.set_state(State.RUNNING)
    row.beat(12345)
    row.advance_step()
    row.advance_step()
    row.add_restart()
    (actor,) = [actor for actor in Counters.attach_readonly(counters.run_id).actors() if actor.name == "api1"]
    assert (actor.role, actor.rank, actor.pid, actor.start_ticks) == ("api", 1, me.pid, me.start_ticks)
    assert (actor.epoch, actor.state, actor.heartbeat_ns, actor.step, actor.restarts) == (2, State.RUNNING, 12345, 2, 1)
    assert [actor.name for actor in counters.actors()] == ACTORS


def test_error_log_counts_distinct_errors(counters: Counters) -> None:
    for text in ("disk is full", "peer left", "disk is full"):
        counters.errors.record("api0", text)
    counters.errors.record("api1", "disk is full")
    entries = {(entry.actor, entry.text): entry for entry in Counters.attach_readonly(counters.run_id).errors.entries()}
    assert {key: entry.count for key, entry in entries.items()} == {
        ("api0", "disk is full"): 2,
        ("api0", "peer left"): 1,
        ("api1", "disk is full"): 1,
    }
    twice = entries["api0", "disk is full"]
    assert 0 < twice.first_ns <= entries["api0", "peer left"].first_ns <= twice.last_ns


def test_error_log_continues_after_a_restart(counters: Counters) -> None:
    counters.errors.record("api0", "boom")
    Counters.attach(counters.run_id).errors.record("api0", "boom")
    assert [(entry.text, entry.count) for entry in counters.errors.entries()] == [("boom", 2)]


def test_full_error_log_counts_the_rest_together(counters: Counters) -> None:
    for number in range(ENTRIES_PER_ACTOR + 5):
        counters.errors.record("api0", f"error {number}")
    entries = {entry.text: entry.count for entry in counters.errors.entries()}
    assert len(entries) == ENTRIES_PER_ACTOR
    assert entries[OVERFLOW_TEXT] == 6
    assert entries["error 0"] == 1


def test_long_and_odd_error_texts_are_truncated(counters: Counters) -> None:
    for text in ("æ" * 1000, "a\0b", "lone \ud800 surrogate", ""):
        counters.errors.record("api0", text)
        counters.errors.record("api0", text)
    entries = {entry.text: entry.count for entry in counters.errors.entries()}
    assert entries == {"æ" * 243: 2, "a b": 2, "lone ? surrogate": 2, "": 2}


def test_counting_continues_after_a_kill(counters: Counters) -> None:
    program = (
        "import os, sys\nfrom shm.counters import Counters\ncounters = Counters.attach(sys.argv[1])\n"
        "counters.counter('requests_total', 'api0').add(5)\ncounters.histogram('latency_seconds', 'api0').observe(0.5)\n"
        "os.kill(os.getpid(), 9)"
    )
    for life in (1, 2, 3):
        assert subprocess.run([sys.executable, "-c", program, counters.run_id], check=False).returncode == -9
        assert counters.counter("requests_total", "api0").value == 5 * life
        assert counters.histogram("latency_seconds", "api0").count == life


def test_file_of_a_dead_engine_is_readable(run_id: str) -> None:
    program = (
        "import os, sys\nfrom shm.counters import Counters\nfrom tests.shm.test_counters import ACTORS, METRICS\n"
        "counters = Counters.create(sys.argv[1], ACTORS, METRICS.__getitem__)\n"
        "counters.counter('requests_total', 'api1').add(3)\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, run_id], check=False).returncode == -9
    path = DIRECTORY / segment_name(run_id, "counters", "main")[1:]
    for run in (run_id, path, str(path)):
        looking = Counters.attach_readonly(run)
        assert value_of(looking, "requests_total", actor="api1") == 3
        assert not looking.segment.owner.is_alive()


def test_concurrent_reads_never_decrease(counters: Counters) -> None:
    """Each histogram's count equals the sum of its buckets, however reads fall between the stores."""
    program = (
        "import sys\nfrom shm.counters import Counters\ncounters = Counters.attach(sys.argv[1])\n"
        "requests = counters.counter('requests_total', 'api0')\nlatency = counters.histogram('latency_seconds', 'api0')\n"
        "row = counters.actor('api0')\n"
        "while True:\n    requests.add(1); latency.observe(0.5); row.advance_step(); row.beat(row.heartbeat_ns + 1)"
    )
    with subprocess.Popen([sys.executable, "-c", program, counters.run_id]) as writer:
        try:
            looking = Counters.attach_readonly(counters.run_id)
            last = (0, 0, 0, 0)
            while last[0] < 10_000:
                assert writer.poll() is None
                metrics = {row["name"]: row for row in looking.snapshot()["metrics"] if row["labels"] == {"actor": "api0"}}
                actor = looking.actor("api0")
                now = (
                    metrics["requests_total"]["value"],
                    metrics["latency_seconds"]["count"],
                    actor.step,
                    actor.heartbeat_ns,
                )
                assert all(before <= after for before, after in zip(last, now, strict=True))
                last = now
        finally:
            writer.kill()


def test_file_is_self_describing(counters: Counters) -> None:
    """The diagrams of native/layout.h suffice: header, then JSON, then words."""
    counters.counter("requests_total", "api1").add(4)
    path = DIRECTORY / segment_name(counters.run_id, "counters", "main")[1:]
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data[:8] == b"TOKAMAK1"
        metadata_offset, metadata_bytes = struct.unpack_from("<QQ", data, 256 + 16)
        offset, num_bytes = json.loads(data[metadata_offset : metadata_offset + metadata_bytes])["api1"]
        rows = json.loads(data[offset : offset + num_bytes])
        (row,) = [row for row in rows if row["name"] == "requests_total"]
        assert row["labels"] == {"actor": "api1"}
        assert (row["help"], row["unit"], row["type"]) == ("Requests.", "requests", "i64")
        assert struct.unpack_from("<q", data, row["offset"]) == (4,)


def test_writer_reads_only_its_own_rows(counters: Counters) -> None:
    """Six processes attach at every start, and there are a thousand rows: damage in the rows of others is not even seen."""
    with counters.segment.buffer[:] as buffer:
        where = bytes(buffer).index(b'"actor": "api1"')
        buffer[where : where + 15] = bytes(15)
    own = Counters.attach(counters.run_id)
    own.counter("requests_total", "api0").add(3)
    assert own.counter("requests_total", "api0").value == 3
    with pytest.raises(json.JSONDecodeError):
        own.snapshot()


def test_values_do_not_share_lines(counters: Counters) -> None:
    offsets = [row["offset"] for row in counters.rows]
    assert len(set(offsets)) == len(offsets)
    assert all(offset % layout.LINE == 0 for offset in offsets)
    assert isinstance(counters.counter("requests_total", "api0"), Cell)


def test_snapshot_is_plain_data(counters: Counters) -> None:
    counters.errors.record("api0", "boom")
    snapshot = counters.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot["run_id"] == counters.run_id
    assert snapshot["created_ns"] > 0
    assert os.getpid() == counters.segment.owner.pid
